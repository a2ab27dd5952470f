"""Many runs of the fast core side by side, for training: advanced together, observed and decided about as arrays.

Each environment is a run of its own programs on engines of equal specs; no event of one touches another. Their whole
changing state is one array, a row per environment, so that a policy's batch costs no copying but what it reads, a
snapshot of all is a copy, and a policy network is asked once for all of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError

from . import fast_state as at
from .compiled import HAS_NUMBA
from .fast_run import FastRun
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
            ConfigError: no environments, different numbers of programs, or what `FastRun` refuses.
        """
        sizes = {len(one) for one in programs}
        if len(sizes) != 1:
            raise ConfigError(f"environments have {sorted(sizes)} programs; there must be some, equally many in each")
        n_calls = min(one.n_calls for one in programs)
        # Equal shapes need equally long logs: the shortest environment's calls are run in each.
        first = FastRun(specs, programs[0], n_agents, decides=True, max_calls=n_calls, is_compiled=is_compiled)
        n_words = max(len(first.memory), *(self._words(specs, one, n_agents, n_calls) for one in programs))
        self.memory = np.zeros((len(programs), n_words), np.int64)
        """All changing state, shape (environments, words). A copy is a snapshot; written back, all go on from there."""
        self.runs = [
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
        self._n_blocks = np.array([spec.n_blocks for spec in specs], np.float64)

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
        begin, n_engines = self.runs[0].engines_at, len(self._n_blocks)
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
        return self.memory.view(np.float64)[:, at.CLOCK].copy()

    def first_prompts(self, asked: Ints) -> Ints:
        """Tokens of the first prompts of the programs asked about, shape (environments,); 0 where none is."""
        tokens = [
            int(run.programs.growth_tokens[run.programs.offsets[i]]) if i >= 0 else 0
            for run, i in zip(self.runs, asked.tolist(), strict=True)
        ]
        return np.array(tokens, np.int64)
