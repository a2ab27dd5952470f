"""Many runs side by side, for training: advanced together, observed and decided about as arrays.

Each environment is a run of its own programs on engines of equal specs; no event of one touches another, and a policy
network is asked once for all of them. On the fast core their whole changing state is one array, a row per environment,
so that a policy's batch costs no copying but what it reads. Engines beyond the fast core (hybrid models, priorities)
run by block, behind the same interface and slower.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError

from . import fast_state as at
from .block_run import BlockRun
from .compiled import HAS_NUMBA
from .fast_run import FastRun, is_fast
from .programs import Floats, Ints, Programs
from .vllm_engine import VllmEngineSpec

LOAD_COLUMNS = ("n_running", "n_waiting", "kv_usage_ratio", "context_tokens")
"""What is seen of an engine: what its own metrics would say. Contexts of requests that decode."""


class LockStep:
    """Environments that ask for an engine of each new program.

    >>> from loadwise.sim.programs import pack
    >>> one = pack([([100], [5], [0.0]), ([200], [5], [0.0])])
    >>> runs = LockStep([VllmEngineSpec(), VllmEngineSpec()], [one, one, one], 2, is_compiled=False)
    >>> runs.advance().tolist(), runs.advance(np.array([0, 1, 0])).tolist()
    ([0, 0, 0], [1, 1, 1])
    >>> runs.loads()[:, :, 0].tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """

    def __init__(
        self,
        specs: Sequence[VllmEngineSpec],
        programs: Sequence[Programs],
        n_agents: int,
        *,
        is_compiled: bool = HAS_NUMBA,
    ) -> None:
        """
        Args:
            programs: Of each environment; equally many everywhere.
            n_agents: Programs under way at once in each.

        Raises:
            ConfigError: no environments, different numbers of programs, no engines, or a number is out of range.
        """
        sizes = {len(one) for one in programs}
        if len(sizes) != 1:
            raise ConfigError(f"environments have {sorted(sizes)} programs; there must be some, equally many in each")
        n_calls = min(one.n_calls for one in programs)
        self._n_blocks = np.array([spec.n_blocks for spec in specs], np.float64)
        self.memory: Ints | None = None
        """On the fast core all changing state, shape (environments, words); None where engines run by block."""
        self.runs: Sequence[FastRun | BlockRun]
        if all(is_fast(specs, one) for one in programs):
            self.runs = self._fast(specs, programs, n_agents, n_calls, is_compiled=is_compiled)
        else:
            self.runs = [BlockRun(specs, one, n_agents, max_calls=n_calls, is_compiled=is_compiled) for one in programs]

    def _fast(
        self,
        specs: Sequence[VllmEngineSpec],
        programs: Sequence[Programs],
        n_agents: int,
        n_calls: int,
        *,
        is_compiled: bool,
    ) -> list[FastRun]:
        # Equal shapes need equally long logs: the shortest environment's calls are run in each.
        first = FastRun(specs, programs[0], n_agents, decides=True, max_calls=n_calls, is_compiled=is_compiled)
        n_words = max(len(first.memory), *(self._words(specs, one, n_agents, n_calls) for one in programs))
        self.memory = np.zeros((len(programs), n_words), np.int64)
        return [
            FastRun(
                specs,
                one,
                n_agents,
                decides=True,
                max_calls=n_calls,
                is_compiled=is_compiled,
                memory=row[: self._words(specs, one, n_agents, n_calls)],
            )
            for one, row in zip(programs, self.memory, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.runs)

    @staticmethod
    def _words(specs: Sequence[VllmEngineSpec], programs: Programs, n_agents: int, n_calls: int) -> int:
        return len(FastRun(specs, programs, n_agents, max_calls=n_calls, is_compiled=False).memory)

    def advance(self, choices: "npt.NDArray[np.integer] | None" = None) -> Ints:
        """Give each environment the engine for the program that it asked about, and run each to its next question.

        Args:
            choices: Shape (environments,); where an environment asked nothing its entry is ignored. None at the start.

        Returns:
            The program that each asks about; -1 where it is over.

        Raises:
            ConfigError: a wrong number of choices, or an engine that does not exist.
        """
        if choices is None:
            choices = np.full(len(self.runs), -1)
        if len(choices) != len(self.runs):
            raise ConfigError(f"{len(choices)} choices for {len(self.runs)} environments")
        asked = [run.advance(choice=choice) for run, choice in zip(self.runs, choices.tolist(), strict=True)]
        return np.array(asked, np.int64)

    def loads(self) -> Floats:
        """What engines' metrics would say now, shape (environments, engines, `LOAD_COLUMNS`)."""
        run, n_engines = self.runs[0], len(self._n_blocks)
        if self.memory is None or isinstance(run, BlockRun):
            return np.array([run.loads() for run in self.runs if isinstance(run, BlockRun)])
        begin = run.engines_at
        engines = self.memory[:, begin : begin + at.N_ENGINE * n_engines].reshape(
            len(self.runs), n_engines, at.N_ENGINE
        )
        seen = np.empty((len(self.runs), n_engines, len(LOAD_COLUMNS)))
        seen[:, :, 0] = engines[:, :, at.N_RUNNING]
        seen[:, :, 1] = engines[:, :, at.N_WAITING]
        seen[:, :, 2] = 1 - engines[:, :, at.FREE] / self._n_blocks
        seen[:, :, 3] = engines[:, :, at.CONTEXT]
        return seen

    def now_s(self) -> Floats:
        """The instant of each environment, shape (environments,)."""
        return np.array([run.now_s for run in self.runs])

    def save(self) -> Any:
        """A snapshot of all environments, for `restore`."""
        if self.memory is not None:
            return self.memory.copy()
        return [run.save() for run in self.runs if isinstance(run, BlockRun)]

    def restore(self, saved: Any) -> None:
        """Let all go on from a snapshot, as often as wanted."""
        if self.memory is not None:
            self.memory[:] = saved
            return
        for run, one in zip(self.runs, saved, strict=True):
            if isinstance(run, BlockRun):
                run.restore(one)

    def first_prompts(self, asked: Ints) -> Ints:
        """Tokens of the first prompts of the programs asked about, shape (environments,); 0 where none is."""
        tokens = [
            int(run.programs.growth_tokens[run.programs.offsets[i]]) if i >= 0 else 0
            for run, i in zip(self.runs, asked.tolist(), strict=True)
        ]
        return np.array(tokens, np.int64)
