"""In stepped time the emulator is the simulator: the same hits, preemptions, order and token times, bit for bit."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.emulator.backend import EmulatedBackendSpec
from loadwise.emulator.emulator import EmulatorSpec, spec_from_scenario, start_emulator
from loadwise.emulator.remote import RemoteEngine, Writer
from loadwise.emulator.thread import emulator_in_thread
from loadwise.kernel.commands import Command
from loadwise.kernel.errors import ConfigError, Overloaded
from loadwise.kernel.events import Event
from loadwise.kernel.streams import Streams
from loadwise.settings import open_stack
from loadwise.sim.engine import ContextTooLong, Engine, EngineRequest, Output, Step
from loadwise.sim.scenario import EngineSpec, OpenEngine, Scenario, open_engine
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec
from loadwise.sim.world import World
from sim.vllm_requests import Ask, Script, asks, most_tokens, script, specs

from .loopback import Client, chat, on_loop

SLOW_STEP = {"fixed_s": 0.02, "weights_s": 0.03, "gemm_s_per_token": 2e-4, "request_s": 1e-3}
THRASHING = {"num_gpu_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 256, "step": SLOW_STEP}


@contextmanager
def stepped(*engines: EngineSpec) -> Iterator[list[str]]:
    """Base URLs of stepped engines that serve `m`."""
    backends = tuple(EmulatedBackendSpec(name=f"e{i}", model="m", engine=spec) for i, spec in enumerate(engines))
    with emulator_in_thread(EmulatorSpec(backends=backends, is_stepped=True)) as handle:
        yield list(handle.urls.values())


class Instant(NamedTuple):
    """What an engine did at one instant, and how it stood then."""

    at_s: float
    outputs: tuple[Output, ...]
    running: tuple[int, ...]
    signals: dict[str, float]


def play(engine: VllmEngine | RemoteEngine, run: Script) -> list[Instant]:
    """Drive an engine through a script, stopping at every single token."""
    todo: list[tuple[float, int, Any]] = sorted(
        [(at_s, 0, request) for at_s, request in run.arrivals] + [(at_s, 1, i) for at_s, i in run.cancels],
        key=lambda one: one[:2],
    )
    seen: list[Instant] = []
    while True:
        now_s = seen[-1].at_s if seen else 0.0
        token_s = token_due_at_s(engine, now_s)
        due_at_s = min([at for at in (token_s, todo[0][0] if todo else None) if at is not None], default=None)
        if due_at_s is None:
            return seen
        outputs = engine.step(due_at_s).outputs
        if todo and todo[0][0] == due_at_s:
            _, is_cancel, what = todo.pop(0)
            engine.cancel(what) if is_cancel else engine.submit(what)
            outputs += engine.step(due_at_s).outputs
        seen.append(Instant(due_at_s, outputs, running(engine), engine.signals(due_at_s)))
        engine.check()


def token_due_at_s(engine: VllmEngine | RemoteEngine, now_s: float) -> float | None:
    """When the next token is due."""
    if isinstance(engine, RemoteEngine):
        return engine.token_due_at_s
    after_s = engine.until_token_s(now_s)
    return now_s + after_s if after_s > 0 else None


def running(engine: VllmEngine | RemoteEngine) -> tuple[int, ...]:
    """Who was let in, in order."""
    if isinstance(engine, RemoteEngine):
        return tuple(engine.running)
    return tuple(call.request.request_id for call in engine.scheduler.running)


def over_http(spec: VllmEngineSpec, run: Script) -> list[Instant]:
    """`play` on a stepped emulator."""
    with stepped(spec) as (url,):
        engine = RemoteEngine(url, "m")
        try:
            return play(engine, run)
        finally:
            engine.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=asks, spec=specs, is_patient=st.booleans())
def test_every_token_comes_when_the_simulator_says(
    turns: Sequence[Ask], spec: VllmEngineSpec, is_patient: bool
) -> None:
    """Random programs, shared and edited prefixes, cancels, priorities, hybrid states: all instants are equal."""
    run = script(turns, most_tokens(spec), is_patient=is_patient)
    assert over_http(spec, run) == play(VllmEngine(spec), run)


def test_a_thrashing_cache_is_the_same_over_http() -> None:
    """Five growing programs in a cache for two: preemptions, lost prefixes and hits, each at its instant."""
    turns = [Ask("abcde"[i % 5], 30, 100, after_s=0.3) for i in range(30)]
    spec = VllmEngineSpec(num_gpu_blocks=52, block_size=8, max_num_seqs=5, max_num_batched_tokens=64)
    run = script(turns, most_tokens(spec))
    run.cancels.extend((at_s + 0.15, request.request_id) for at_s, request in run.arrivals[::7])
    ours = play(VllmEngine(spec), run)
    last = ours[-1].signals
    assert last["n_preemptions"] >= 4
    assert 0 < last["prefix_hits_tokens"] < last["prefix_queries_tokens"]
    assert sum(len(one.outputs) for one in ours) > 500
    assert over_http(spec, run) == ours


class Notes:
    """Everything that happened in a run: what engines said and a journal's content."""

    def __init__(self) -> None:
        self.said: list[tuple[str, float, Step]] = []
        self.journal: list[bytes] = []

    def append(self, event: Event, commands: list[Command]) -> None:
        self.journal.append(msgspec.json.encode((event, commands)))

    def flush(self) -> None:
        return None


class Noted:
    """An engine whose steps are written down."""

    def __init__(self, engine: Engine, name: str, notes: Notes) -> None:
        self._engine = engine
        self._name = name
        self._notes = notes
        self.submit, self.cancel, self.set_speed = engine.submit, engine.cancel, engine.set_speed
        self.signals, self.check = engine.signals, engine.check

    def step(self, now_s: float) -> Step:
        step = self._engine.step(now_s)
        if step.outputs:
            self._notes.said.append((self._name, now_s, msgspec.structs.replace(step, seconds=0.0)))
        return step


def world(scenario: Scenario, seed: int, opener: OpenEngine) -> tuple[bytes, Notes]:
    """Run a scenario under its pool's stack with engines from somewhere."""
    notes = Notes()

    def noted(spec: EngineSpec, streams: Streams, name: str) -> Engine:
        return Noted(opener(spec, streams, name), name, notes)

    machine = open_stack(scenario.config, seed)
    hold_limit_s = scenario.config.router.hold_max_s
    run = World(scenario, machine, seed, journal=notes, hold_limit_s=hold_limit_s, open_engine=noted)
    return run.run().to_json(), notes


def world_over_http(scenario: Scenario, seed: int) -> tuple[bytes, Notes]:
    """The same with every engine behind HTTP; one that crashes is opened again."""
    spec = msgspec.structs.replace(spec_from_scenario(scenario), is_stepped=True)
    opened: dict[str, RemoteEngine] = {}
    with emulator_in_thread(spec) as handle:

        def remote(_: EngineSpec, __: Streams, name: str) -> Engine:
            if name in opened:
                opened[name].close()
            opened[name] = RemoteEngine(handle.urls[name], "m")
            return opened[name]

        try:
            return world(scenario, seed, remote)
        finally:
            for engine in opened.values():
                engine.close()


def pool_of_two(**changes: Any) -> Scenario:
    """Two small engines, one of them hybrid by priority, and twelve agents with a common system prompt."""
    document: dict[str, Any] = {
        "scenario": 1,
        "name": "stepped",
        "n_programs": 16,
        "pool": {
            "models": {"m": {}},
            "backends": [{"name": name, "model": "m", "slots": 6, "first_byte_timeout_s": 6.0} for name in ("a", "b")],
            "router": {"policy": "least_loaded"},
        },
        "engines": {
            "a": {"kind": "vllm", **THRASHING},
            "b": {"kind": "vllm", **THRASHING, "n_state_groups": 1, "scheduling_policy": "priority"},
        },
        "workload": {
            "arrivals": {"kind": "closed", "n_agents": 8, "think_s": {"exponential": 0.2}},
            "turns": {"geometric": 4, "max": 6},
            "first_prompt_tokens": {"uniform": [120, 300]},
            "growth_tokens": {"uniform": [0, 60]},
            "output_tokens": {"geometric": 60, "max": 150},
            "shared_tokens": 100,
            "tool_s": {"exponential": 0.3},
            "patience_s": {"exponential": 20.0},
        },
        "signals": {"every_s": 0.5, "delay_s": 0.1},
    }
    return msgspec.convert(document | changes, Scenario)


FAILURES = [
    {"at_s": 3.0, "backend": "a", "kind": "slow", "speed_ratio": 0.3, "for_s": 2.0},
    {"at_s": 8.0, "backend": "a", "kind": "crash", "for_s": 3.0},
    {"at_s": 4.0, "backend": "b", "kind": "crash", "for_s": 1.0},
    {"at_s": 9.0, "backend": "b", "kind": "hang", "for_s": 2.0},
]


def n_preemptions(notes: Notes) -> float:
    """As the last reading of each engine said."""
    last: dict[str, float] = {}
    for entry in notes.journal:
        event, _ = msgspec.json.decode(entry)
        if event["type"] == "SignalsObserved":
            last[event["backend_id"]] = event["values"]["n_preemptions"]
    return sum(last.values())


def test_a_world_over_http_is_the_world_byte_by_byte() -> None:
    """Under router, agents and their patience, report, journal and every output are equal, for each of five seeds."""
    total, n_left = 0.0, 0
    for seed in range(5):
        scenario = pool_of_two()
        report, notes = world(scenario, seed, open_engine)
        report_http, notes_http = world_over_http(scenario, seed)
        assert notes_http.said == notes.said
        assert notes_http.journal == notes.journal
        assert report_http == report
        total += n_preemptions(notes)
        n_left += json_of(report)["turns"].get("cancelled", 0)
    assert total > 0
    assert n_left > 0


def json_of(report: bytes) -> Any:
    return msgspec.json.decode(report)


@pytest.mark.parametrize("seed", range(3))
def test_misfortunes_are_the_same_over_http(seed: int) -> None:
    """Slow-down, crash, restart with a cold cache and hang, from the same scenario, end in the same bytes."""
    scenario = pool_of_two(failures=FAILURES)
    report, notes = world(scenario, seed, open_engine)
    report_http, notes_http = world_over_http(scenario, seed)
    assert (notes_http.said, notes_http.journal) == (notes.said, notes.journal)
    assert report_http == report
    assert any(b"the engine crashed" in entry for entry in notes.journal)


def request(i: int, prompt: int, output: int = 4, **more: Any) -> EngineRequest:
    return EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=prompt, output_tokens=output, **more)


def test_named_blocks_of_a_trace_hit_over_http() -> None:
    """Prompts that name their blocks (as Mooncake's trace) find them, whichever program asks."""
    arrivals = [
        (0.0, request(1, 1200, prefix_ids=(7, 8))),
        (9.0, request(2, 1300, prefix_ids=(7, 8))),
        (18.0, request(3, 700, prefix_ids=(7, 9))),
    ]
    run = Script(arrivals, [], {})
    found = over_http(VllmEngineSpec(num_gpu_blocks=200), run)
    assert found == play(VllmEngine(VllmEngineSpec(num_gpu_blocks=200)), run)
    cached = {out.request_id: out.cached_tokens for one in found for out in one.outputs}
    assert cached == {1: 0, 2: 1024, 3: 512}


def test_refusals_cross_the_wire() -> None:
    """What can never fit and what finds the queue full are the errors they are in the simulator, and move nothing."""
    with stepped(VllmEngineSpec(num_gpu_blocks=10, max_waiting=1)) as (url,):
        engine = RemoteEngine(url, "m")
        with pytest.raises(ContextTooLong):
            engine.submit(request(1, 400))
        engine.submit(request(2, 100))
        engine.step(0.0)
        engine.submit(request(3, 100))
        with pytest.raises(Overloaded, match="1 requests wait"):
            engine.submit(request(4, 100))
        assert engine.signals(0.0)["n_running"] == engine.signals(0.0)["n_waiting"] == 1
        assert not engine.cancel(4) and engine.cancel(2)
        engine.close()


def test_prompts_have_equal_text_where_tokens_are_equal() -> None:
    """A program's next prompt repeats its context up to the edit, a stranger's only what is shared."""
    writer = Writer()
    first = EngineRequest(request_id=1, program_id="a", prompt_tokens=50, output_tokens=2, shared_tokens=20)
    text = writer.open(first)
    writer.close(first, "said" * 2)
    edited = msgspec.structs.replace(first, request_id=2, prompt_tokens=60, prefix_tokens=30)
    other = msgspec.structs.replace(first, request_id=3, program_id="b")
    again, foreign = writer.open(edited), writer.open(other)
    assert (len(text), len(again)) == (200, 240)
    assert again[:120] == text[:120] and again[120:124] != text[120:124]
    assert foreign[:80] == text[:80] and foreign[80:84] != text[80:84]


async def stepped_client(**fields: Any) -> tuple[Any, Client]:
    backend = EmulatedBackendSpec(name="a", model="m", engine=VllmEngineSpec(num_gpu_blocks=100), **fields)
    handle = await start_emulator(EmulatorSpec(backends=(backend,), is_stepped=True))
    return handle, Client(handle.backends["a"])


@on_loop
async def test_time_stands_still_until_it_is_moved_token_by_token() -> None:
    """No token comes by itself; each step without an instant brings exactly one, and says when it was due."""
    handle, client = await stepped_client()
    answer = client.send(chat("x" * 400, max_tokens=5, ignore_eos=True, stream=True))
    texts, times = [], []
    while not answer.over.done():
        state = await control(client, b"POST", "step")
        texts += [said["n_new_tokens"] for said in state["said"]]
        times += [said["at_s"] for said in state["said"]]
        if state["n_open"] == 0 and texts:
            await answer.over
    assert texts == [1] * 5
    assert times == sorted(set(times)) and times[0] > 0
    assert [len(chunk["choices"][0]["delta"].get("content", "")) for chunk in answer.chunks] == [0, 4, 4, 4, 4, 4, 0]
    await client.upstream.close()
    await handle.close()


async def control(client: Client, method: bytes, what: str, body: bytes = b"{}") -> Any:
    found = await client.upstream.fetch(method, f"/emulator/{what}", body=body, from_root=True)
    return msgspec.json.decode(found.body)


@on_loop
@pytest.mark.parametrize(
    ("what", "body", "says"),
    [
        ("step", b'{"to_s": -1}', "to_s is -1.0"),
        ("step", b'{"to_s": 1e300}', "to_s is beyond 1000000000"),
        ("step", b'{"at_s": 1' + b"0" * 400 + b"}", "at_s is beyond"),
        ("speed", b'{"ratio": 1' + b"0" * 400 + b"}", "ratio is beyond"),
        ("step", b'{"to_s": "soon"}', "to_s is 'soon'"),
        ("step", b'{"to_s": 1, "at_s": 1}', "one of them"),
        ("step", b"[]", "not an object"),
        ("step", b"{", "not JSON"),
        ("speed", b'{"ratio": 0}', "ratio is 0.0"),
        ("speed", b"{}", "ratio is None"),
        ("jump", b"{}", "is not served"),
    ],
)
async def test_wrong_commands_are_told_what_is_wrong(what: str, body: bytes, says: str) -> None:
    """A command that makes no sense is a 400 that names the value, and time stays where it was."""
    handle, client = await stepped_client()
    found = await client.upstream.fetch(b"POST", f"/emulator/{what}", body=body, from_root=True)
    assert found.status == 400
    assert says in msgspec.json.decode(found.body)["error"]["message"]
    assert handle.backends["a"].driver.now_s == 0.0
    await client.upstream.close()
    await handle.close()


@on_loop
async def test_the_clock_of_a_usual_emulator_cannot_be_touched() -> None:
    """Control exists in stepped time only."""
    backend = EmulatedBackendSpec(name="a", model="m")
    handle = await start_emulator(EmulatorSpec(backends=(backend,)))
    client = Client(handle.backends["a"])
    found = await client.upstream.fetch(b"POST", "/emulator/step", body=b"{}", from_root=True)
    assert found.status == 404
    with pytest.raises(ConfigError, match="not a stepped one"):
        handle.backends["a"].driver.advance(1.0)
    await client.upstream.close()
    await handle.close()


@on_loop
async def test_a_restart_breaks_what_runs_and_forgets_the_cache() -> None:
    """The client sees its connection break, the engine is empty, the clock goes on."""
    handle, client = await stepped_client()
    await control(client, b"POST", "step", b'{"to_s": 3.5}')
    answer = client.send(chat("x" * 400, max_tokens=50, ignore_eos=True, stream=True))
    while (await control(client, b"POST", "step"))["n_open"] == 0:
        pass
    state = await control(client, b"POST", "restart")
    assert await answer.over == "reset" or await answer.over == "truncated"
    assert (state["n_open"], state["running"], state["due_after_s"]) == (0, [], 0.0)
    assert state["now_s"] > 3.5 and math.isfinite(state["now_s"])
    await client.upstream.close()
    await handle.close()


def test_a_stepped_emulator_has_no_scale() -> None:
    """A clock that stands still cannot be fast."""
    with pytest.raises(ConfigError, match="scale is 2"):
        EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m"),), scale=2.0, is_stepped=True)
