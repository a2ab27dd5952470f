"""Agents that run the same scripted programs on an engine in virtual time and on a server in real time.

A script is a list of programs, each a list of turns; a chain is the order in which one agent asks them, waiting for
each answer and then for the turn's gap. One chain a program is a closed loop; one chain for all of them, in a fixed
order, is a run whose cache does not depend on how long anything takes.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from loadwise.sim.engine import Engine, EngineRequest
from loadwise.sim.vllm_engine import VllmEngine

STAGGER_S = 0.002
READING_S = 0.25
"""Between two readings of an engine's load."""


class Turn(NamedTuple):
    """One call of a program."""

    growth_tokens: int
    output_tokens: int
    gap_s: float


class Script(NamedTuple):
    """What is asked."""

    programs: list[list[Turn]]
    shared_tokens: int = 0
    keeps_replies: bool = True
    """The next prompt repeats the answer; else it goes on from the last prompt."""

    @property
    def n_calls(self) -> int:
        return sum(map(len, self.programs))


Chains = Sequence[Sequence[tuple[int, int]]]


def closed_loop(script: Script) -> Chains:
    """One agent a program."""
    return [[(p, t) for t in range(len(program))] for p, program in enumerate(script.programs)]


def in_turn(script: Script, seed: int = 0) -> Chains:
    """One agent for all, which takes up programs in a random order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation([p for p, program in enumerate(script.programs) for _ in program])
    n_asked: dict[int, int] = {}
    chain = []
    for p in map(int, order):
        chain.append((p, n_asked.get(p, 0)))
        n_asked[p] = n_asked.get(p, 0) + 1
    return [chain]


class Seen(NamedTuple):
    """One call as its client saw it, in seconds since the run began."""

    program: int
    turn: int
    arrived_at_s: float
    prompt_tokens: int
    cached_tokens: int
    token_at_s: tuple[float, ...]

    @property
    def first_s(self) -> float:
        return self.token_at_s[0] - self.arrived_at_s

    @property
    def latency_s(self) -> float:
        return self.token_at_s[-1] - self.arrived_at_s


class Run(NamedTuple):
    """All calls in the order in which they were answered, and what the engine said of itself."""

    calls: list[Seen]
    kv_usage: list[float]
    signals: Mapping[str, float]

    @property
    def makespan_s(self) -> float:
        return max(call.token_at_s[-1] for call in self.calls)


def draw(
    n_programs: int,
    n_turns: int,
    *,
    first: tuple[int, int],
    growth: tuple[int, int],
    output: tuple[int, int],
    gap_s: float,
    shared_tokens: int = 0,
    keeps_replies: bool = True,
    seed: int = 0,
) -> Script:
    """Programs with uniform sizes and exponential gaps."""
    rng = np.random.default_rng(seed)
    programs = []
    for _ in range(n_programs):
        sizes = [rng.integers(*(first if t == 0 else growth), endpoint=True) for t in range(n_turns)]
        program = [
            Turn(int(size), int(rng.integers(*output, endpoint=True)), float(rng.exponential(gap_s))) for size in sizes
        ]
        programs.append(program)
    return Script(programs, shared_tokens, keeps_replies)


class _Talk:
    __slots__ = ("arrived_at_s", "cached_tokens", "chain", "prompt_tokens", "step", "token_at_s")

    def __init__(self, chain: int, step: int, arrived_at_s: float, prompt_tokens: int) -> None:
        self.chain, self.step = chain, step
        self.arrived_at_s, self.prompt_tokens = arrived_at_s, prompt_tokens
        self.cached_tokens = 0
        self.token_at_s: list[float] = []


class _Simulation:
    """A script on an engine in virtual time; every token is fetched at its own instant where the engine knows it."""

    def __init__(self, engine: Engine, script: Script, chains: Chains) -> None:
        self.engine, self.script, self.chains = engine, script, chains
        self.context = [0] * len(script.programs)
        self.talks: dict[int, _Talk] = {}
        self.calls: list[Seen] = []
        self.kv_usage: list[float] = []
        self.due = [(STAGGER_S * i, i, 0) for i, chain in enumerate(chains) if chain]
        self.wake_at_s = math.inf
        self.n_asked = 0

    def run(self) -> Run:
        now_s, reading_at_s = 0.0, READING_S
        while self.due or self.wake_at_s < math.inf:
            now_s = min(self.due[0][0] if self.due else math.inf, self.wake_at_s)
            while reading_at_s <= now_s:
                self.kv_usage.append(self.engine.signals(reading_at_s)["kv_usage_ratio"])
                reading_at_s += READING_S
            if self.due and self.due[0][0] == now_s:
                self.step(now_s)
                _, chain, step = heapq.heappop(self.due)
                self.ask(chain, step, now_s)
            self.step(now_s)
            self.engine.check()
        return Run(self.calls, self.kv_usage, self.engine.signals(now_s))

    def ask(self, chain: int, step: int, now_s: float) -> None:
        p, t = self.chains[chain][step]
        turn, known = self.script.programs[p][t], self.context[p]
        self.context[p] = known + turn.growth_tokens
        self.n_asked += 1
        self.talks[self.n_asked] = _Talk(chain, step, now_s, self.context[p])
        self.engine.submit(
            EngineRequest(
                request_id=self.n_asked,
                program_id=f"p{p}",
                prompt_tokens=self.context[p],
                output_tokens=turn.output_tokens,
                prefix_tokens=known,
                shared_tokens=self.script.shared_tokens,
                luck=self.n_asked,
            )
        )

    def step(self, now_s: float) -> None:
        step = self.engine.step(now_s)
        after_s = step.seconds
        if isinstance(self.engine, VllmEngine) and after_s > 0:
            after_s = min(self.engine.until_token_s(now_s), after_s)
        self.wake_at_s = now_s + after_s if after_s > 0 else math.inf
        for output in step.outputs:
            talk = self.talks[output.request_id]
            talk.token_at_s += [now_s] * output.n_new_tokens
            talk.cached_tokens = max(talk.cached_tokens, output.cached_tokens)
            if output.is_finished:
                self.finish(self.talks.pop(output.request_id), now_s)

    def finish(self, talk: _Talk, now_s: float) -> None:
        p, t = self.chains[talk.chain][talk.step]
        turn = self.script.programs[p][t]
        if self.script.keeps_replies:
            self.context[p] += turn.output_tokens
        self.calls.append(Seen(p, t, talk.arrived_at_s, talk.prompt_tokens, talk.cached_tokens, tuple(talk.token_at_s)))
        if talk.step + 1 < len(self.chains[talk.chain]):
            heapq.heappush(self.due, (now_s + turn.gap_s, talk.chain, talk.step + 1))


def simulated(engine: Engine, script: Script, chains: Chains) -> Run:
    """Run a script in virtual time."""
    return _Simulation(engine, script, chains).run()


class Answered(NamedTuple):
    """What an endpoint says of a call when it is over."""

    prompt_tokens: int
    cached_tokens: int


class Endpoint(Protocol):
    """A server under test. It keeps the programs' contexts, in whatever form it sends them."""

    async def ask(self, program: int, turn: Turn, script: Script, hear: Callable[[int], None]) -> Answered:
        """Ask a program's next turn; `hear` is told of so many tokens as they come."""
        ...

    async def signals(self) -> Mapping[str, float]:
        """The engine's readings, under the names of `Engine.signals`; those it does not export are absent."""
        ...


async def live(endpoint: Endpoint, script: Script, chains: Chains) -> Run:
    """Run a script in real time."""
    loop = asyncio.get_running_loop()
    calls: list[Seen] = []
    kv_usage: list[float] = []
    before = await endpoint.signals()
    began_s = loop.time()

    async def agent(number: int, chain: Sequence[tuple[int, int]]) -> None:
        await asyncio.sleep(STAGGER_S * number)
        for p, t in chain:
            turn, token_at_s = script.programs[p][t], list[float]()

            def hear(n: int, token_at_s: list[float] = token_at_s) -> None:
                token_at_s += [loop.time() - began_s] * n

            arrived_at_s = loop.time() - began_s
            answered = await endpoint.ask(p, turn, script, hear)
            if len(token_at_s) != turn.output_tokens:
                raise RuntimeError(f"call {p}/{t} said {len(token_at_s)} tokens, {turn.output_tokens} were asked for")
            calls.append(Seen(p, t, arrived_at_s, *answered, tuple(token_at_s)))
            await asyncio.sleep(turn.gap_s)

    async def read() -> None:
        while True:
            await asyncio.sleep(READING_S)
            kv_usage.append((await endpoint.signals()).get("kv_usage_ratio", math.nan))

    reader = asyncio.create_task(read())
    try:
        await asyncio.gather(*(agent(i, chain) for i, chain in enumerate(chains)))
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    after = await endpoint.signals()
    counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Run(calls, kv_usage, counters)


def figures(run: Run) -> dict[str, float]:
    """What is compared: latencies in seconds, hits, preemptions, load."""
    latency = np.array([call.latency_s for call in run.calls])
    first = np.array([call.first_s for call in run.calls])
    between = np.concatenate([np.diff(call.token_at_s) for call in run.calls])
    cached = sum(call.cached_tokens for call in run.calls)
    found = {
        "n_calls": float(len(run.calls)),
        "latency_mean_s": float(latency.mean()),
        "latency_p95_s": float(np.percentile(latency, 95)),
        "first_token_mean_s": float(first.mean()),
        "first_token_p95_s": float(np.percentile(first, 95)),
        "between_tokens_mean_s": float(between.mean()) if len(between) else 0.0,
        "makespan_s": run.makespan_s,
        "prompt_tokens": float(sum(call.prompt_tokens for call in run.calls)),
        "hit_tokens": float(cached),
        "hit_ratio": cached / sum(call.prompt_tokens for call in run.calls),
    }
    if "n_preemptions" in run.signals:
        found["n_preemptions"] = run.signals["n_preemptions"]
    usage = [value for value in run.kv_usage if not math.isnan(value)]
    if usage:
        found |= {"kv_usage_mean": float(np.mean(usage)), "kv_usage_max": max(usage)}
    return found


def agreement(ours: Run, theirs: Run) -> dict[str, float]:
    """How far two runs of one script agree call by call: hits, order of first tokens, and token times."""
    of_theirs = {(call.program, call.turn): call for call in theirs.calls}
    pairs = [(call, of_theirs[call.program, call.turn]) for call in ours.calls]
    firsts = sorted(pairs, key=lambda pair: pair[0].token_at_s[0])
    offsets = [
        abs((a - x.arrived_at_s) - (b - y.arrived_at_s)) / max(y.latency_s, 1e-9)
        for x, y in pairs
        for a, b in zip(x.token_at_s, y.token_at_s, strict=True)
    ]
    return {
        "calls_with_equal_hits": sum(x.cached_tokens == y.cached_tokens for x, y in pairs) / len(pairs),
        "order_agreement": _in_order([y.token_at_s[0] for _, y in firsts]),
        "token_time_error_mean": float(np.mean(offsets)),
        "token_time_error_p95": float(np.percentile(offsets, 95)),
    }


def _in_order(values: Sequence[float]) -> float:
    """Share of pairs that are in rising order."""
    n = len(values)
    rising = sum(values[i] <= values[j] for i in range(n) for j in range(i + 1, n))
    return rising / max(n * (n - 1) // 2, 1)


class Events:
    """A sink that hands on the data of each event of a stream, as it comes."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hear = hear
        self._rest = b""
        self._status = 0

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._status != 200:
            return
        for line in lines:
            if line.startswith(b"data: {"):
                self._hear(line.removeprefix(b"data: "))

    def on_end(self) -> None:
        self._finish(None if self._status == 200 else f"status {self._status}: {self._rest.decode(errors='replace')}")

    def on_error(self, kind: str, detail: str) -> None:
        self._finish(f"{kind}: {detail}")

    def _finish(self, problem: str | None) -> None:
        if self.over.done():
            return
        if problem is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(RuntimeError(problem))


def prometheus(page: str) -> dict[str, float]:
    """Samples of a page of metrics, summed over labels, by name."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            key = name.partition("{")[0]
            values[key] = values.get(key, 0.0) + float(value)
    return values


def compared(ours: Run, theirs: Run, prefix: str = "") -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Our figures, theirs, and ours over theirs less one (or the difference where theirs is 0), by prefixed key."""
    a, b = figures(ours), figures(theirs)
    keys: list[Any] = [key for key in a if key in b]
    off = {key: a[key] / b[key] - 1 if b[key] else a[key] - b[key] for key in keys}
    return tuple({prefix + key: table[key] for key in keys} for table in (a, b, off))  # type: ignore[return-value]
