"""Engines on one GPU: its time is shared as by a processor-sharing station, and its KV memory is never exceeded."""

from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.streams import Streams
from loadwise.sim.calendar import Calendar, Rank
from loadwise.sim.engine import Engine, EngineRequest
from loadwise.sim.hardware import GIB
from loadwise.sim.kv_arena import KvArena
from loadwise.sim.scenario import Scenario, convert_scenario, open_engine
from loadwise.sim.shared_gpu import SharedGpu, SharedGpuSpec
from loadwise.sim.simulate import simulate
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

from .engine_driver import drive
from .vllm_requests import QUICK, Ask, asks, most_tokens, script

TICK = StepCost(fixed_s=0.01, weights_s=0, gemm_s_per_token=0, kv_s_per_token=0, attention_s_per_pair=0, request_s=0)


class Bench:
    """Engines on one GPU, driven through a calendar as the world drives them."""

    def __init__(self, spec: SharedGpuSpec, engines: dict[str, VllmEngineSpec], capacity: int | None = None) -> None:
        self.calendar = Calendar()
        self.gpu = SharedGpu(spec, lambda: self.calendar.now_s, self.poke)
        self.done_at_s: dict[int, float] = {}
        self.first_at_s: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self._tokens: dict[str, object] = {}
        self.engines: dict[str, Engine] = {}
        arena = None if capacity is None else KvArena(capacity)
        self.gpu.arena = arena
        for name, engine in engines.items():
            pool = None if arena is None else arena.open(name, engine.block_tokens, self._freed(name))
            self.engines[name] = self.gpu.join(name, VllmEngine(engine, shared_pool=pool))

    def _freed(self, name: str) -> Any:
        return lambda: self.gpu.memory_freed(name)

    def poke(self, name: str) -> None:
        self.calendar.put(self.calendar.now_s, Rank.ENGINE, lambda: self.step(name))

    def send(self, at_s: float, name: str, request: EngineRequest) -> None:
        def act() -> None:
            self.step(name)
            self.engines[name].submit(request)
            self.step(name)

        self.calendar.put(at_s, Rank.AGENT, act)

    def step(self, name: str) -> None:
        now_s, token = self.calendar.now_s, object()
        step = self.engines[name].step(now_s)
        for output in step.outputs:
            if output.is_first:
                self.first_at_s[output.request_id] = now_s
                self.cached[output.request_id] = output.cached_tokens
            if output.is_finished:
                self.done_at_s[output.request_id] = now_s
        self._tokens[name] = token
        if step.seconds > 0:
            self.calendar.put(now_s + step.seconds, Rank.ENGINE, lambda: self.wake(name, token))

    def wake(self, name: str, token: object) -> None:
        if self._tokens[name] is token:
            self.step(name)

    def run(self) -> dict[int, float]:
        while len(self.calendar):
            action, _ = self.calendar.pop()
            action()
            for engine in self.engines.values():
                engine.check()
        return self.done_at_s


def ask(i: int, output: int, prompt: int = 1) -> EngineRequest:
    return EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=prompt, output_tokens=output)


def two(overlap_ratio: float = 1.0) -> Bench:
    spec = VllmEngineSpec(num_gpu_blocks=50, step=TICK)
    return Bench(SharedGpuSpec(backends=["a", "b"], overlap_ratio=overlap_ratio), {"a": spec, "b": spec})


def test_alone_on_a_gpu_nothing_is_felt() -> None:
    """One engine at work has the whole GPU."""
    bench = two()
    bench.send(0.0, "a", ask(1, 100))
    assert bench.run()[1] == pytest.approx(1.0)


def test_two_take_turns_from_the_instant_the_second_begins() -> None:
    """Processor sharing, exactly: work of 1 s from 0 and of 1 s from 0.5 on ends at 1.5 and at 2, in mid-step too."""
    bench = two()
    bench.send(0.0, "a", ask(1, 100))
    bench.send(0.5037, "b", ask(2, 100))
    done = bench.run()
    assert done[1] == pytest.approx(0.5037 + 2 * (1 - 0.5037), abs=1e-4)
    assert done[2] == pytest.approx(2.0, abs=1e-4)
    assert bench.gpu.work_s == pytest.approx(2.0, abs=1e-4)
    assert bench.gpu.busy_s == pytest.approx(2.0, abs=1e-4)


@pytest.mark.parametrize(("overlap_ratio", "until_s"), [(1.0, 2.0), (1.25, 1.6), (2.0, 1.0)])
def test_overlap_is_what_they_get_done_together(overlap_ratio: float, until_s: float) -> None:
    """From pure time slicing to no interference at all."""
    bench = two(overlap_ratio)
    bench.send(0.0, "a", ask(1, 100))
    bench.send(0.0, "b", ask(2, 100))
    assert bench.run() == pytest.approx({1: until_s, 2: until_s}, abs=1e-4)


jobs = st.lists(st.tuples(st.floats(0, 3), st.sampled_from("abc"), st.integers(1, 80)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(jobs=jobs, overlap_ratio=st.floats(1, 3))
def test_work_is_conserved(jobs: list[tuple[float, str, int]], overlap_ratio: float) -> None:
    """Law: one at a time per engine, all work is done, none twice, and never more in a second than the GPU has."""
    spec = VllmEngineSpec(num_gpu_blocks=50, step=TICK, max_num_seqs=1)
    bench = Bench(SharedGpuSpec(backends=["a", "b", "c"], overlap_ratio=overlap_ratio), dict.fromkeys("abc", spec))
    for i, (at_s, name, output) in enumerate(jobs):
        bench.send(at_s, name, ask(i, output))
    done = bench.run()
    assert len(done) == len(jobs)
    assert bench.gpu.work_s == pytest.approx(0.01 * sum(output for _, _, output in jobs), rel=1e-3)
    for i, (at_s, _, output) in enumerate(jobs):
        assert done[i] >= at_s + 0.01 * output - 1e-4


def small(size: int, groups: int) -> VllmEngineSpec:
    return VllmEngineSpec(num_gpu_blocks=1, block_size=size, n_state_groups=groups, step=QUICK)


@settings(max_examples=60, deadline=None)
@given(turns=asks, n_blocks=st.integers(24, 50), groups=st.sampled_from([0, 3]))
def test_a_memory_of_ones_own_is_a_plain_pool(turns: list[Ask], n_blocks: int, groups: int) -> None:
    """Law: an engine that shares its memory with nobody does what it does with blocks of its own, to the last hit."""
    spec = VllmEngineSpec(num_gpu_blocks=n_blocks, block_size=8, n_state_groups=groups, step=QUICK)
    made = script(turns, most_tokens(spec))
    pool = KvArena(n_blocks * 100 + 99).open("a", 100)
    shared = VllmEngine(spec, shared_pool=pool)
    plain = VllmEngine(spec, has_macro_steps=False)
    assert drive(shared, made.arrivals, made.cancels) == drive(plain, made.arrivals, made.cancels)
    assert shared.signals(1e9) == plain.signals(1e9)
    assert pool.n_used == 0


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.floats(0, 5), st.sampled_from("ab"), st.integers(1, 150), st.integers(1, 60)),
        min_size=1,
        max_size=14,
    ),
    capacity=st.integers(500, 900),
    groups=st.sampled_from([0, 3]),
)
def test_shared_memory_is_never_exceeded_and_everybody_ends(
    turns: list[tuple[float, str, int, int]], capacity: int, groups: int
) -> None:
    """Law: with blocks of different sizes in one memory, its books balance after every event, and all calls end."""
    engines = {"a": small(16, groups), "b": small(11, 0)}
    bench = Bench(SharedGpuSpec(backends=["a", "b"], shares_kv=True), engines, capacity)
    for i, (at_s, name, prompt, output) in enumerate(turns):
        bench.send(at_s, name, ask(i, output, prompt))
    assert len(bench.run()) == len(turns)
    assert bench.gpu.arena is not None
    assert bench.gpu.arena.used_bytes == 0


def test_what_another_uses_is_not_to_be_had() -> None:
    """While one engine's call fills the memory, another's waits; it enters in the instant in which that one ends."""
    bench = Bench(
        SharedGpuSpec(backends=["a", "b"], shares_kv=True), {"a": small(10, 0), "b": small(10, 0)}, capacity=400
    )
    bench.send(0.0, "a", ask(1, 40, prompt=350))
    bench.send(0.1, "b", ask(2, 5, prompt=200))
    done = bench.run()
    assert bench.first_at_s[2] > done[1]


def test_the_longest_unused_content_gives_way_whosever_it_is() -> None:
    """Content of one engine is forgotten for the other's needs, oldest first; younger content stays."""
    bench = Bench(
        SharedGpuSpec(backends=["a", "b"], shares_kv=True), {"a": small(10, 0), "b": small(10, 0)}, capacity=500
    )

    def again(i: int, program: str, prompt: int) -> EngineRequest:
        return EngineRequest(request_id=i, program_id=program, prompt_tokens=prompt, output_tokens=1)

    for at_s, name, request in (
        (0.0, "a", again(1, "old", 200)),
        (10.0, "b", again(2, "young", 200)),
        (20.0, "b", again(3, "other", 200)),
        (30.0, "b", again(4, "young", 205)),
        (40.0, "a", again(5, "old", 205)),
    ):
        bench.send(at_s, name, request)
    bench.run()
    # 500 hold 200 + 200; the third needs 100 more, which is half of the oldest.
    assert bench.cached[4] == 200
    assert 0 <= bench.cached[5] < 200


def test_books_that_do_not_balance_are_found() -> None:
    """Memory counted wrongly, overcommitted, or work beyond what a GPU can do."""
    arena = KvArena(100)
    pool = arena.open("a", 10)
    taken = pool.take(10)
    assert pool.n_free == 0
    with pytest.raises(LawBroken, match="1 blocks are taken, 0"):
        pool.take(1)
    with pytest.raises(LawBroken, match="are in use"):
        arena.make_room(1)
    pool.give_back(taken)
    arena.check()
    arena.used_bytes += 1
    with pytest.raises(LawBroken, match="counted"):
        arena.check()
    arena.used_bytes -= 1
    pool.take(10)
    arena.capacity_bytes = 50
    with pytest.raises(LawBroken, match="that engines share"):
        arena.check()
    bench = two()
    bench.gpu.work_s = 1.0
    with pytest.raises(LawBroken, match="of work"):
        bench.gpu.check()


TEXT = """
scenario: 1
name: one-gh200
n_programs: 10
pool:
  models: {large: {usd_per_million: {input: 1, output: 2}}, small: {}}
  backends: [{name: a, model: large, engine: vllm}, {name: b, model: small, engine: vllm}, {name: c, model: small}]
  router: {policy: round_robin}
engines:
  a: {kind: vllm, hardware: {gpu: gh200, model: qwen3.6-27b, precision: fp8}}
  b: {kind: vllm, hardware: {gpu: gh200, model: qwen3.5-9b}}
gpus:
  g: {backends: [a, b], shares_kv: true}
workload: {preset: terminus, arrivals: {kind: closed, n_agents: 5}, turns: 6}
failures: [{at_s: 30, backend: a, kind: crash, for_s: 10}]
"""


def world(**changes: Any) -> Scenario:
    document = yaml.safe_load(TEXT)
    for key, value in changes.items():
        document[key] = document[key] | value if isinstance(document[key], dict) else value
    return convert_scenario(document)


def test_both_models_of_oracle_fit_on_one_gh200() -> None:
    """One memory for both, less than either has alone; the world runs, crash included, and is the same twice."""
    scenario = world()
    shared = scenario.shared_kv_bytes(scenario.gpus["g"])
    large, small_ = scenario.engine_spec("a"), scenario.engine_spec("b")
    assert isinstance(large, VllmEngineSpec) and isinstance(small_, VllmEngineSpec)
    assert large.n_blocks == shared // (784 * 65536)
    assert small_.n_blocks == shared // (528 * 32768)
    alone = scenario.engines["a"]
    assert isinstance(alone, VllmEngineSpec)
    assert large.n_blocks < alone.n_blocks
    reports = [simulate(scenario, 3).to_json() for _ in range(2)]
    assert reports[0] == reports[1]
    assert msgspec.json.decode(reports[0])["programs"]["open"] == 0


def test_a_shared_gpu_is_slower_than_two() -> None:
    """The same work on one GPU takes longer than on one each; with full overlap and memory to spare as long."""
    kv = {"num_gpu_blocks": 300}
    document = yaml.safe_load(TEXT) | {"failures": []}
    for name in "ab":
        document["engines"][name] |= kv
    times = []
    for gpus in ({}, {"g": {"backends": ["a", "b"], "overlap_ratio": 2}}, {"g": {"backends": ["a", "b"]}}):
        times.append(simulate(convert_scenario(document | {"gpus": gpus}), 3).elapsed_s)
    assert times[1] == pytest.approx(times[0], rel=1e-6)
    assert times[2] > 1.02 * times[0]


@pytest.mark.parametrize(
    ("gpus", "named"),
    [
        ({"g": {"backends": ["a"]}}, "at least two"),
        ({"g": {"backends": ["a", "a"]}}, "each once"),
        ({"g": {"backends": ["a", "z"]}}, "'z' is not in the pool"),
        ({"g": {"backends": ["a", "b"], "shares_kv": True}, "h": {"backends": ["b", "c"]}}, "'b' is on 'g' already"),
        ({"g": {"backends": ["a", "b"], "overlap_ratio": 3}}, "overlap_ratio is 3"),
        ({"g": {"backends": ["a", "b"], "overlap_ratio": 0.5}}, "overlap_ratio is 0.5"),
        ({"g": {"backends": ["a", "b"], "kv_gib": 5}}, "kv_gib is 5"),
        ({"g": {"backends": ["a", "b"], "shares_kv": True, "kv_gib": float("nan")}}, "kv_gib is nan"),
        ({"g": {"backends": ["a", "b"], "shares_kv": True, "kv_gib": 90}}, "want 90.0 GiB for KV, weights leave"),
        ({"g": {"backends": ["a", "c"], "shares_kv": True}}, "'c' needs kind vllm"),
        ({"g": {"backends": ["a", "b"]}}, "GiB for KV"),
    ],
)
def test_what_one_gpu_cannot_be_is_refused(gpus: dict[str, Any], named: str) -> None:
    """Names, bounds, and memory: engines that keep what each has alone do not fit on one GPU together."""
    document = yaml.safe_load(TEXT) | {"gpus": gpus}
    with pytest.raises(ConfigError, match=named):
        convert_scenario(document)


def test_hardware_must_agree() -> None:
    """One GPU is of one kind; a shared memory has no blocks of one engine; an API has no GPU."""
    other = {"b": {"kind": "vllm", "hardware": {"gpu": "h200", "model": "qwen3.5-9b"}}}
    with pytest.raises(ConfigError, match="must agree in gpu"):
        world(engines=other)
    blocks = {"b": {"kind": "vllm", "hardware": {"gpu": "gh200", "model": "qwen3.5-9b"}, "num_gpu_blocks": 9}}
    with pytest.raises(ConfigError, match="num_gpu_blocks 9"):
        world(engines=blocks)
    with pytest.raises(ConfigError, match="is an API"):
        world(engines={"b": {"kind": "api"}})
    assert (
        world(gpus={"g": {"backends": ["a", "b"], "shares_kv": True, "kv_gib": 8}}).shared_kv_bytes(
            SharedGpuSpec(backends=["a", "b"], shares_kv=True, kv_gib=8)
        )
        == 8 * GIB
    )
    assert isinstance(open_engine(VllmEngineSpec(), Streams(0), "a"), VllmEngine)
