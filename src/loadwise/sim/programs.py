"""Many programs as arrays, and the closed loop that runs them on engines without a router in between.

This is the short circuit for laws, calibration and speed: N agents, each running its next program when its last one is
over, each program one append-only conversation. Programs are kept to one engine from their first turn on. What decides
where they go is fixed (fewest requests), so that only engines are under test. Two cores run it: `run_by_block` here,
which drives any `Engine`, and the fast one (`fast_core`), which must agree with it.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError, LawBroken

from .engine import Engine, EngineRequest, wake_at_s

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

STAGGER_S = 0.001
"""Between the starts of two agents, so that equal instants do not decide anything."""


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of all programs, one program after the other (offsets as in a CSR matrix)."""

    offsets: Ints
    """Program i has the turns `offsets[i]` to `offsets[i + 1]`."""
    growth_tokens: Ints
    """Added to the context before a turn: the whole prompt at the first."""
    output_tokens: Ints
    gap_s: Floats
    """From a turn's answer to the program's next turn."""
    shared_tokens: int = 0
    """Leading tokens that all programs have in common."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_calls(self) -> int:
        """Turns of all programs."""
        return int(self.offsets[-1])

    def check(self) -> None:
        """Raise `ConfigError` where a number is out of range."""
        starts = self.offsets[:-1]
        if len(self.offsets) < 2 or self.offsets[0] != 0 or (np.diff(self.offsets) < 1).any():
            raise ConfigError("offsets of programs must begin at 0 and rise: every program has a turn")
        for name in ("growth_tokens", "output_tokens", "gap_s"):
            found = len(getattr(self, name))
            if found != self.n_calls:
                raise ConfigError(f"programs have {self.n_calls} turns and {found} values of {name}")
        if (self.growth_tokens[starts] < 1).any() or (self.growth_tokens < 0).any():
            raise ConfigError("growth_tokens must be >= 0, and >= 1 at a program's first turn")
        if (self.output_tokens < 1).any():
            raise ConfigError(f"output_tokens has {int(self.output_tokens.min())}; every turn says at least 1 token")
        if not (np.isfinite(self.gap_s).all() and (self.gap_s >= 0).all()):
            raise ConfigError("gap_s must be finite and >= 0")
        if self.shared_tokens < 0 or (self.growth_tokens[starts] < self.shared_tokens).any():
            raise ConfigError(f"shared_tokens is {self.shared_tokens!r}; every first prompt must be at least as long")


def pack(programs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], shared_tokens: int = 0) -> Programs:
    """Programs from lists of (growth, output, gap) of each.

    Raises:
        ConfigError: a number is out of range.
    """

    def column(i: int, kind: Any) -> Any:
        return np.array([value for program in programs for value in program[i]], dtype=kind)

    packed = Programs(
        offsets=np.cumsum([0, *(len(program[0]) for program in programs)], dtype=np.int64),
        growth_tokens=column(0, np.int64),
        output_tokens=column(1, np.int64),
        gap_s=column(2, np.float64),
        shared_tokens=shared_tokens,
    )
    packed.check()
    return packed


class CallLog(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the calls, in the order in which they finished."""

    call: Ints
    """Index into the programs' turns."""
    engine: Ints
    arrived_at_s: Floats
    first_at_s: Floats
    finished_at_s: Floats
    prompt_tokens: Ints
    hit_tokens: Ints
    output_tokens: Ints
    n_preemptions: int
    end_s: float

    def __len__(self) -> int:
        return len(self.call)

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens found in a cache; 0 of nothing."""
        return float(self.hit_tokens.sum() / max(int(self.prompt_tokens.sum()), 1))

    @property
    def output_tokens_per_s(self) -> float:
        """Answered tokens over the whole run."""
        return float(self.output_tokens.sum() / self.end_s) if self.end_s > 0 else 0.0


class _Agent:
    __slots__ = ("arrived_at_s", "context_tokens", "engine", "first_at_s", "hit_tokens", "i_turn", "number", "program")

    def __init__(self, number: int) -> None:
        self.number = number
        self.program = -1
        self.i_turn = 0
        self.context_tokens = 0
        self.engine = 0
        self.arrived_at_s = self.first_at_s = 0.0
        self.hit_tokens = 0


class Loop:
    """One run; see `run_by_block`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        programs: Programs,
        n_agents: int,
        max_calls: int,
        *,
        decides: bool = False,
    ) -> None:
        """
        Args:
            decides: Whether `run` stops where a program needs an engine, which `choose` then names.
        """
        self.engines = engines
        self.programs = programs
        self.max_calls = max_calls
        self.rows: list[tuple[int, int, float, float, float, int, int, int]] = []
        self.agents = [_Agent(i) for i in range(min(n_agents, len(programs)))]
        self.now_s = 0.0
        self.asking: _Agent | None = None
        """Whose program needs an engine."""
        self._decides = decides
        self._next_program = 0
        self._due: list[tuple[float, int]] = []
        self._wake_at_s = [float("inf")] * len(engines)
        self._n_open = [0] * len(engines)
        self._by_request: dict[int, _Agent] = {}
        self._n_asked = 0
        for agent in self.agents:
            self._start(agent, STAGGER_S * agent.number)

    def run(self, until_s: float) -> None:
        """Until the time is up, the calls are done, or a program needs an engine."""
        while len(self.rows) < self.max_calls and self.asking is None:
            wake_at_s = min(self._wake_at_s)
            if min(wake_at_s, self._due[0][0] if self._due else wake_at_s) > until_s:
                break
            if self._due and self._due[0][0] <= wake_at_s:
                self.now_s, number = heapq.heappop(self._due)
                agent = self.agents[number]
                if self._decides and agent.i_turn == 0:
                    self.asking = agent
                else:
                    self._ask(agent, self.now_s)
            elif wake_at_s < float("inf"):
                self.now_s = wake_at_s
                self._step(self._wake_at_s.index(wake_at_s), self.now_s)
            else:
                break

    def choose(self, engine: int) -> None:
        """The engine of the program that was asked about."""
        agent, self.asking = self.asking, None
        if agent is None:
            raise ConfigError("no program needs an engine")
        agent.engine = engine
        self._ask(agent, self.now_s)

    def check(self) -> None:
        """Every call that was asked is answered or open (L1), and every engine's books balance."""
        for engine in self.engines:
            engine.check()
        if sum(self._n_open) != len(self._by_request) or self._n_asked != len(self.rows) + len(self._by_request):
            raise LawBroken(
                "L1",
                f"{self._n_asked} calls were asked, {len(self.rows)} answered and {len(self._by_request)} are open",
            )

    def log(self) -> CallLog:
        """The calls that are over."""
        columns: list[Any] = list(zip(*self.rows, strict=True)) or [()] * 8
        ints, floats = np.int64, np.float64
        return CallLog(
            call=np.array(columns[0], ints),
            engine=np.array(columns[1], ints),
            arrived_at_s=np.array(columns[2], floats),
            first_at_s=np.array(columns[3], floats),
            finished_at_s=np.array(columns[4], floats),
            prompt_tokens=np.array(columns[5], ints),
            hit_tokens=np.array(columns[6], ints),
            output_tokens=np.array(columns[7], ints),
            n_preemptions=round(sum(engine.signals(self.now_s)["n_preemptions"] for engine in self.engines)),
            end_s=self.now_s,
        )

    def _start(self, agent: _Agent, at_s: float) -> None:
        if self._next_program < len(self.programs):
            agent.program, agent.i_turn, agent.context_tokens = self._next_program, 0, 0
            self._next_program += 1
            heapq.heappush(self._due, (at_s, agent.number))

    def _ask(self, agent: _Agent, now_s: float) -> None:
        call = int(self.programs.offsets[agent.program]) + agent.i_turn
        if agent.i_turn == 0 and not self._decides:
            agent.engine = self._n_open.index(min(self._n_open))
        agent.context_tokens += int(self.programs.growth_tokens[call])
        agent.arrived_at_s = now_s
        request = EngineRequest(
            request_id=call,
            program_id=str(agent.program),
            prompt_tokens=agent.context_tokens,
            output_tokens=int(self.programs.output_tokens[call]),
            shared_tokens=self.programs.shared_tokens,
        )
        self._by_request[call] = agent
        self._n_asked += 1
        self._n_open[agent.engine] += 1
        self._step(agent.engine, now_s)
        self.engines[agent.engine].submit(request)
        self._step(agent.engine, now_s)

    def _step(self, i: int, now_s: float) -> None:
        step = self.engines[i].step(now_s)
        self._wake_at_s[i] = wake_at_s(now_s, step.seconds) if step.seconds > 0 else float("inf")
        for output in step.outputs:
            agent = self._by_request[output.request_id]
            if output.is_first:
                agent.first_at_s, agent.hit_tokens = now_s, output.cached_tokens
            if output.is_finished:
                self._finish(agent, output.request_id, now_s)

    def _finish(self, agent: _Agent, call: int, now_s: float) -> None:
        n_output = int(self.programs.output_tokens[call])
        times = (agent.arrived_at_s, agent.first_at_s, now_s)
        self.rows.append((call, agent.engine, *times, agent.context_tokens, agent.hit_tokens, n_output))
        self._n_open[agent.engine] -= 1
        del self._by_request[call]
        agent.context_tokens += n_output
        agent.i_turn += 1
        if call + 1 < self.programs.offsets[agent.program + 1]:
            heapq.heappush(self._due, (now_s + float(self.programs.gap_s[call]), agent.number))
        else:
            self._start(agent, now_s)


def run_by_block(
    engines: Sequence[Engine],
    programs: Programs,
    n_agents: int,
    *,
    max_calls: int | None = None,
    until_s: float = math.inf,
) -> CallLog:
    """Run programs on engines of any kind, step by step.

    Args:
        n_agents: Programs under way at once.
        max_calls: Stop after so many; all where absent.
        until_s: Nothing happens later.

    Raises:
        ConfigError: a number is out of range.
        LawBroken: at the end an engine's books do not balance, or a call is lost.
    """
    programs.check()
    if n_agents < 1 or not engines:
        raise ConfigError(f"{n_agents} agents on {len(engines)} engines; there must be at least one of each")
    loop = Loop(engines, programs, n_agents, programs.n_calls if max_calls is None else max_calls)
    loop.run(until_s)
    loop.check()
    return loop.log()
