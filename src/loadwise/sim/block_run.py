"""The closed loop of `programs` on block-level engines, in the hands of a caller who chooses engines.

What `FastRun` is for the fast core, for every engine of vLLM's kind: hybrid models, priorities, no prefix cache.
Engines are compiled where there is compiled code for them; what drives them is Python, so it is much slower.
"""

import copy
import math
from collections.abc import Sequence

import numpy as np

from loadwise.kernel.errors import ConfigError

from .compiled import HAS_NUMBA
from .hybrid_engine import HybridEngine, fits_hybrid
from .programs import CallLog, Loop, Programs
from .vllm_engine import VllmEngine, VllmEngineSpec


def _check_lengths(specs: Sequence[VllmEngineSpec], programs: Programs) -> None:
    totals = np.add.reduceat(programs.growth_tokens + programs.output_tokens, programs.offsets[:-1])
    for spec in specs:
        most = (spec.n_blocks - 2 * spec.state_groups) * spec.block_tokens + 1
        most = min(most, spec.max_model_len or most)
        if totals.max() > most:
            raise ConfigError(f"program {int(totals.argmax())} grows to {totals.max()} tokens; an engine takes {most}")


class BlockRun:
    """One run; each program's engine is asked for when it starts.

    >>> from loadwise.sim.programs import pack
    >>> spec = VllmEngineSpec(block_size=16, num_gpu_blocks=400, n_state_groups=3)
    >>> run = BlockRun([spec, spec], pack([([100], [5], [0.0]), ([200], [5], [0.0])]), 2, is_compiled=False)
    >>> run.advance(), run.advance(choice=1), run.advance(choice=0), len(run.log())
    (0, 1, -1, 2)
    """

    def __init__(
        self,
        specs: Sequence[VllmEngineSpec],
        programs: Programs,
        n_agents: int,
        *,
        max_calls: int | None = None,
        is_compiled: bool = HAS_NUMBA,
    ) -> None:
        """
        Args:
            n_agents: Programs under way at once.
            is_compiled: Plain Python otherwise, with the same results.

        Raises:
            ConfigError: no engines, no agents, a number of the programs is out of range, or one fits not every engine.
        """
        programs.check()
        if n_agents < 1 or not specs:
            raise ConfigError(f"{n_agents} agents on {len(specs)} engines; there must be at least one of each")
        _check_lengths(specs, programs)
        self.programs = programs
        self.specs = tuple(specs)
        engines = [
            HybridEngine(spec, is_compiled=True) if is_compiled and fits_hybrid(spec) else VllmEngine(spec)
            for spec in specs
        ]
        n_calls = programs.n_calls if max_calls is None else min(max_calls, programs.n_calls)
        self._loop = Loop(engines, programs, n_agents, n_calls, decides=True)

    def advance(self, until_s: float = math.inf, choice: int = -1) -> int:
        """Run until a program needs an engine (its number), or until the time is up or all is done (-1).

        Args:
            choice: The engine for the program that was asked about last.

        Raises:
            ConfigError: there is no such engine.
        """
        if self.asking >= 0:
            if not 0 <= choice < len(self.specs):
                raise ConfigError(f"choice is {choice!r}; there are engines 0..{len(self.specs) - 1}")
            self._loop.choose(choice)
        self._loop.run(until_s)
        return self.asking

    @property
    def asking(self) -> int:
        """The program that needs an engine; -1 where none does."""
        return -1 if self._loop.asking is None else self._loop.asking.program

    @property
    def now_s(self) -> float:
        """Of the last event."""
        return self._loop.now_s

    def loads(self) -> list[tuple[float, float, float, float]]:
        """Of each engine what its metrics would say now: running, waiting, share of KV, context tokens that decode."""
        now_s, seen = self.now_s, []
        for engine in self._loop.engines:
            said = engine.signals(now_s)
            assert isinstance(engine, HybridEngine | VllmEngine)
            n_context = float(engine.decoding_tokens())
            seen.append((said["n_running"], said["n_waiting"], said["kv_usage_ratio"], n_context))
        return seen

    def log(self) -> CallLog:
        """The calls that are over."""
        return self._loop.log()

    def save(self) -> Loop:
        """The whole state, on its own."""
        return self._copied(self._loop)

    def restore(self, saved: Loop) -> None:
        """Go on from a saved state, as often as wanted."""
        self._loop = self._copied(saved)

    def _copied(self, loop: Loop) -> Loop:
        return copy.deepcopy(loop, {id(self.programs): self.programs})
