"""The virtual host under a simple machine: conservation, misfortunes, luck, limits, and what a machine may see."""

import ast
import heapq
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadwise.kernel.commands import (
    AskSelector,
    CancelAttempt,
    Command,
    Dispatch,
    EndTurn,
    SetTimer,
    Verify,
)
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.events import (
    AttemptEnded,
    BackendChanged,
    Event,
    ProgramEnded,
    SelectorAnswered,
    SignalsObserved,
    TimerFired,
    TurnAbandoned,
    TurnArrived,
    VerdictArrived,
)
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import BackendHealth
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import AttemptOutcome, EndReason, TurnOutcome, VerdictKind
from loadwise.sim.report import Report
from loadwise.sim.scenario import Scenario, load_scenario
from loadwise.sim.servers_engine import erlang_c_wait_s
from loadwise.sim.simulate import simulate
from loadwise.sim.workload import MAX_TURNS
from loadwise.sim.world import World

from .direct_machine import DirectMachine

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "scenarios").glob("*.yaml"))


def scenario(**changes: Any) -> Scenario:
    """Two models on two backends; 40 programs of three turns."""
    document: dict[str, Any] = {
        "scenario": 1,
        "name": "test",
        "n_programs": 40,
        "pool": {
            "models": {"large": {"usd_per_million": {"input": 1.0, "output": 2.0}}, "small": {}},
            "backends": [{"name": "a", "model": "large"}, {"name": "b", "model": "small"}],
        },
        "workload": {
            "arrivals": {"kind": "poisson", "programs_per_s": 1.0},
            "turns": 3,
            "first_prompt_tokens": 500,
            "output_tokens": {"geometric": 50},
            "tool_s": {"exponential": 1.0},
        },
        "truth": {"success": {"large": {"*": 0.9}, "small": {"*": 0.4}}},
        "verdicts": {"source": "verifier", "delay_s": {"exponential": 10}},
    }
    for key, value in changes.items():
        old = document.get(key)
        document[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return msgspec.convert(document, Scenario)


def run(world: Scenario, seed: int = 1, choose: Any = None, **options: Any) -> tuple[Report, DirectMachine]:
    machine = DirectMachine(world.backends, choose, **options)
    return simulate(world, seed, machine=machine), machine


def to(i: int) -> Any:
    """Every turn goes to backend number i."""
    return lambda event: i


def ended(machine: DirectMachine) -> list[AttemptEnded]:
    return machine.of(AttemptEnded)  # type: ignore[return-value]


def test_all_programs_finish_and_turns_are_conserved() -> None:
    """Without misfortune every turn completes once, every program ends once and is judged once (laws L1, L2)."""
    report, machine = run(scenario())
    assert report.programs == {"finished": 40, "open": 0}
    assert report.turns["completed"] == 120 == len(machine.of(TurnArrived)) == len(ended(machine))
    assert sum(report.turns.values()) == 120
    assert len(machine.of(ProgramEnded)) == 40
    assert sum(report.verdicts.values()) == 40 == len(machine.of(VerdictArrived))
    assert report.hit_ratio is not None and 0 < report.hit_ratio < 1


def test_usage_and_cost_are_the_engines() -> None:
    """Prompts grow by answers and tools; the bill is tokens times price, from exact usage."""
    report, machine = run(scenario(n_programs=1), choose=to(0))
    turns = machine.of(TurnArrived)
    usages = [event.usage for event in ended(machine)]
    for before, after, usage in zip(turns, turns[1:], usages, strict=False):
        assert after.prompt_tokens == before.prompt_tokens + usage.completion_tokens + 200
    assert all(usage.is_exact for usage in usages)
    spent = sum(u.prompt_tokens * 1.0 + u.completion_tokens * 2.0 for u in usages) / 1e6
    assert report.cost_usd == pytest.approx(spent)
    assert [u.cached_tokens for u in usages] == [0, *(t.prompt_tokens - 200 for t in turns[1:])]


def test_closed_loop_keeps_its_number_of_agents() -> None:
    """Never more than n agents have a program, and a new one starts as one ends."""
    world = scenario(workload={"arrivals": {"kind": "closed", "n_agents": 5}})
    report, machine = run(world)
    n_open, most = 0, 0
    for event in machine.events:
        n_open += isinstance(event, TurnArrived) and event.program_id not in seen_before(machine, event)
        n_open -= isinstance(event, ProgramEnded)
        most = max(most, n_open)
    assert report.programs["finished"] == 40
    assert most == 5


def seen_before(machine: DirectMachine, event: TurnArrived) -> set[str]:
    """Programs that had a turn before this one."""
    arrived = [e for e in machine.of(TurnArrived) if e.turn_id < event.turn_id]  # type: ignore[attr-defined]
    return {e.program_id for e in arrived}  # type: ignore[attr-defined]


def test_world_reproduces_erlang_c() -> None:
    """The whole host with an M/M/2 station behind it: mean wait within three standard errors of theory."""
    document = load_scenario(ROOT / "examples" / "scenarios" / "mmk.yaml")
    world = msgspec.structs.replace(document, n_programs=2500)
    means = [run(world, seed)[0].first_token_mean_s for seed in range(8)]
    error = statistics.stdev(means) / 8**0.5  # type: ignore[type-var]
    assert abs(statistics.fmean(means) - erlang_c_wait_s(1.4, 1.0, 2)) < 3 * error  # type: ignore[type-var]


def test_world_equals_the_lindley_recursion_draw_by_draw() -> None:
    """With the same arrivals and services the host's mean wait is that of the two-server recursion, to 1e-9."""
    document = load_scenario(ROOT / "examples" / "scenarios" / "mmk.yaml")
    report, _ = run(msgspec.structs.replace(document, n_programs=2000), 11)
    streams, free_at_s, now_s, waited_s = Streams(11), [0.0, 0.0], 0.0, 0.0
    for n in range(1, 2001):
        now_s += float(streams.at("arrival", n).exponential(1 / 1.4))
        begins_at_s = max(now_s, heapq.heappop(free_at_s))
        waited_s += begins_at_s - now_s
        service_s = float(streams.at("service/station", n * MAX_TURNS).exponential(1.0))
        heapq.heappush(free_at_s, begins_at_s + service_s)
    assert report.first_token_mean_s == pytest.approx(waited_s / 2000, rel=1e-9)


def test_luck_depends_on_seed_program_and_model_only() -> None:
    """A program that both policies give to the same model ends the same way, whatever else they do differently."""
    world = scenario(verdicts={"delay_s": 0})

    def judged(choose: Any, seed: int) -> dict[str, bool]:
        _, machine = run(world, seed, choose)
        kinds = {e.program_id: e.verdict.verdict for e in machine.of(VerdictArrived)}  # type: ignore[attr-defined]
        return {program: kind is VerdictKind.PASS for program, kind in kinds.items()}

    def mixed(event: TurnArrived) -> int:
        return int(event.program_id[1:]) % 2

    all_large, mix = judged(to(0), 5), judged(mixed, 5)
    same = [program for program in mix if int(program[1:]) % 2 == 0]
    assert len(same) == 20
    assert all(mix[program] == all_large[program] for program in same)
    assert judged(to(0), 6) != all_large
    assert judged(to(1), 5) != all_large


def test_shapes_do_not_depend_on_the_policy() -> None:
    """Task types, first prompts and numbers of turns are the same under every policy."""
    world = scenario(workload={"task_types": {"x": 1, "y": 2}, "turns": {"geometric": 3}})

    def shape(choose: Any) -> list[tuple[str, str | None, int]]:
        _, machine = run(world, 3, choose)
        first = {e.program_id: e for e in reversed(machine.of(TurnArrived))}  # type: ignore[attr-defined]
        return sorted((p, e.task_type, e.prompt_tokens) for p, e in first.items())  # type: ignore[attr-defined]

    assert shape(to(0)) == shape(to(1))


def test_regret_is_zero_for_the_best_model_and_the_gap_for_the_other() -> None:
    """Regret per program is the difference of true success probabilities."""
    assert run(scenario(), choose=to(0))[0].regret_total == 0.0
    report, _ = run(scenario(), choose=to(1))
    assert report.regret_mean == pytest.approx(0.5)
    assert report.share == {"small": 1.0}


def test_crash_breaks_what_runs_refuses_what_comes_and_heals() -> None:
    """A crash: broken attempts, then refusals, a health event for each change, and work again after the restart."""
    world = scenario(
        n_programs=60,
        engines={"a": {"kind": "simple", "decode_steps_per_s": 10}},
        failures=[{"at_s": 10.0, "backend": "a", "kind": "crash", "for_s": 20.0}],
        signals={"every_s": 1},
    )
    report, machine = run(world, choose=to(0))
    outcomes = {event.outcome for event in ended(machine)}
    assert outcomes == {AttemptOutcome.COMPLETED, AttemptOutcome.BROKEN, AttemptOutcome.REFUSED}
    refused = [e.at_s for e in ended(machine) if e.outcome is AttemptOutcome.REFUSED]
    assert min(refused) >= 10.0 and max(refused) <= 30.0
    changes = [(e.at_s, e.health) for e in machine.of(BackendChanged)]  # type: ignore[attr-defined]
    assert changes == [(10.0, BackendHealth.DOWN), (30.0, BackendHealth.UP)]
    assert max(e.at_s for e in ended(machine) if e.outcome is AttemptOutcome.COMPLETED) > 30.0
    assert report.programs["failed"] > 0
    assert report.programs["open"] == 0


def test_retry_elsewhere_saves_what_had_no_byte() -> None:
    """With a second try on the other backend refused turns complete after all, on the other model."""
    world = scenario(failures=[{"at_s": 0.0, "backend": "a", "kind": "crash"}])
    report, _ = run(world, choose=to(0), n_tries=2)
    assert report.programs == {"finished": 40, "open": 0}
    assert report.share == {"small": 1.0}
    assert report.n_attempts == 240


def test_hang_ends_by_time_limits() -> None:
    """A backend that hangs for good: streams end idle, new turns without a first byte, each at its limit."""
    world = scenario(
        n_programs=30,
        pool={
            "models": {"m": {}},
            "backends": [{"name": "a", "model": "m", "first_byte_timeout_s": 7.0, "idle_timeout_s": 3.0}],
        },
        engines={"a": {"kind": "simple", "decode_steps_per_s": 5}},
        truth={"success": {}},
        failures=[{"at_s": 12.0, "backend": "a", "kind": "hang"}],
    )
    world = msgspec.structs.replace(world, truth=msgspec.convert({}, type(world.truth)))
    _, machine = run(world)
    late = [event for event in ended(machine) if event.at_s > 12.0]
    idle = [event for event in late if event.outcome is AttemptOutcome.IDLE_TIMEOUT]
    mute = [event for event in late if event.outcome is AttemptOutcome.FIRST_BYTE_TIMEOUT]
    arrived = {e.turn_id: e.at_s for e in machine.of(TurnArrived)}  # type: ignore[attr-defined]
    assert idle and mute and len(idle) + len(mute) == len(late)
    assert {event.at_s for event in idle} == {15.0}
    assert all(event.at_s == pytest.approx(arrived[event.turn_id] + 7.0) for event in mute)


def test_slow_backend_serves_more_slowly_while_it_is_slow() -> None:
    """Turns that arrive in the slow period take longer than those before it."""
    world = scenario(
        n_programs=80, failures=[{"at_s": 40.0, "backend": "a", "kind": "slow", "speed_ratio": 0.1, "for_s": 30.0}]
    )
    _, machine = run(world, choose=to(0))
    arrived = {e.turn_id: e.at_s for e in machine.of(TurnArrived)}  # type: ignore[attr-defined]
    took = [(arrived[e.turn_id], e.at_s - arrived[e.turn_id]) for e in ended(machine)]
    before = statistics.fmean(s for at, s in took if at < 35)
    during = statistics.fmean(s for at, s in took if 40 <= at < 65)
    assert during > 3 * before


def test_impatient_clients_leave_and_their_work_is_cancelled() -> None:
    """A client without a first byte leaves, its attempt is cancelled in the engine, its turn counts as cancelled."""
    world = scenario(
        engines={"a": {"kind": "simple", "slots": 1, "decode_steps_per_s": 2}}, workload={"patience_s": 4.0}
    )
    report, machine = run(world, choose=to(0))
    left = {e.turn_id for e in machine.of(TurnAbandoned)}  # type: ignore[attr-defined]
    cancelled = {e.turn_id for e in ended(machine) if e.outcome is AttemptOutcome.CANCELLED}
    assert left == cancelled
    assert report.programs["cancelled"] == len(left) == report.turns["cancelled"] > 0
    reasons = {e.reason for e in machine.of(ProgramEnded)}  # type: ignore[attr-defined]
    assert EndReason.CANCELLED in reasons


def test_final_turns_end_a_program_without_a_call() -> None:
    """With `ends: final` the last turn says so and no finish call follows."""
    _, machine = run(scenario(workload={"ends": "final"}), verifies=False)
    finals = [e for e in machine.of(TurnArrived) if e.is_final]  # type: ignore[attr-defined]
    assert len(finals) == 40
    assert not machine.of(ProgramEnded)


def test_verdicts_are_late_lost_wrong_and_double_as_told() -> None:
    """Loss, noise, abstention and duplicates come in their shares; delays are kept."""
    world = scenario(
        n_programs=400,
        truth={"success": {"large": {"*": 1.0}}},
        verdicts={"delay_s": 5.0, "loss_ratio": 0.2, "false_fail_ratio": 0.3, "duplicate_ratio": 0.5},
    )
    report, machine = run(world, choose=to(0))
    assert report.success == 1.0
    assert report.verdicts["lost"] == pytest.approx(80, abs=30)
    kinds = {e.program_id: e.verdict.verdict for e in machine.of(VerdictArrived)}  # type: ignore[attr-defined]
    fails = sum(kind is VerdictKind.FAIL for kind in kinds.values())
    assert fails / len(kinds) == pytest.approx(0.3, abs=0.08)
    assert len(machine.of(VerdictArrived)) / len(kinds) == pytest.approx(1.5, abs=0.1)
    over = {e.program_id: e.at_s for e in machine.of(ProgramEnded)}  # type: ignore[attr-defined]
    first = {e.program_id: e.at_s for e in reversed(machine.of(VerdictArrived))}  # type: ignore[attr-defined]
    assert all(at_s == pytest.approx(over[p] + 5.0) for p, at_s in first.items())


def test_agents_report_themselves_when_told_to() -> None:
    """With `source: agent` verdicts come although the machine asks for none; with `none` there are none."""
    asked, _ = run(scenario(verdicts={"source": "agent"}), verifies=False)
    silent, _ = run(scenario(verdicts={"source": "none"}))
    assert sum(asked.verdicts.values()) == 40
    assert silent.verdicts == {}


def test_signals_come_at_their_interval_with_their_age() -> None:
    """Readings every 2 s, each 0.5 s old on arrival; every name is the engines' own."""
    _, machine = run(scenario(signals={"every_s": 2.0, "delay_s": 0.5}))
    readings = machine.of(SignalsObserved)
    assert {e.at_s - e.observed_at_s for e in readings} == {0.5}  # type: ignore[attr-defined]
    a = [e.observed_at_s for e in readings if e.backend_id == "a"]  # type: ignore[attr-defined]
    assert a == [2.0 * i for i in range(len(a))]
    assert {"n_running", "kv_usage_ratio"} <= set(readings[0].values)  # type: ignore[attr-defined]


class HoldingMachine(DirectMachine):
    """Holds every turn by a timer, or for ever."""

    def __init__(self, *args: Any, hold_s: float | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hold_s = hold_s
        self._held: dict[str, TurnArrived] = {}

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, TurnArrived):
            self.events.append(event)
            self._held[f"hold/{event.turn_id}"] = event
            if self._hold_s is None:
                return []
            # Set twice: the second setting moves the timer, so that it fires once.
            timer = f"hold/{event.turn_id}"
            return [
                SetTimer(timer=timer, fires_at_s=event.at_s),
                SetTimer(timer=timer, fires_at_s=event.at_s + self._hold_s),
            ]
        if isinstance(event, TimerFired):
            turn = self._held.pop(event.timer)
            return super().handle(msgspec.structs.replace(turn, at_s=event.at_s))
        return super().handle(event)


def test_timers_fire_once_and_holds_are_measured() -> None:
    """A turn held for three seconds waits three seconds; setting a timer again moves it."""
    world = scenario()
    report = simulate(world, 1, machine=HoldingMachine(world.backends, hold_s=3.0), hold_limit_s=3.0)
    assert [report.hold_mean_s, report.hold_p95_s, report.hold_max_s] == pytest.approx([3.0] * 3)


def test_holding_beyond_the_bound_breaks_a_law() -> None:
    """The world notices a turn that is held for longer than the machine's own limit."""
    world = scenario()
    with pytest.raises(LawBroken, match="L9"):
        simulate(world, 1, machine=HoldingMachine(world.backends, hold_s=3.0), hold_limit_s=2.0)


@pytest.mark.parametrize("every_s", [0.0, 60.0])
def test_waiting_for_ever_breaks_a_law(every_s: float) -> None:
    """A machine that never answers is caught, with and without readings going on."""
    world = scenario(signals={"every_s": every_s})
    with pytest.raises(LawBroken, match="L9"):
        simulate(world, 1, machine=HoldingMachine(world.backends, hold_s=None), hold_limit_s=math.inf)


def test_events_are_bounded() -> None:
    """A run that needs more events than permitted is refused (law L15)."""
    with pytest.raises(LawBroken, match="L15"):
        run(scenario(max_events=50))


def test_until_cuts_the_run() -> None:
    """At `until_s` the run stops with open programs, and the books still balance."""
    report, machine = run(scenario(n_programs=None, until_s=20.0))
    assert report.programs["open"] > 0
    assert machine.events[-1].at_s <= 20.0
    assert len(machine.of(TurnArrived)) == sum(report.turns.values())


class BrokenMachine(DirectMachine):
    """Answers the first turn with a fixed list of commands."""

    def __init__(self, *args: Any, commands: list[Command]) -> None:
        super().__init__(*args)
        self._commands = commands

    def handle(self, event: Event) -> list[Command]:
        return self._commands if isinstance(event, TurnArrived) else super().handle(event)


def dispatch(**changes: Any) -> Dispatch:
    facts = {
        "turn_id": 1,
        "attempt": 1,
        "program_id": ProgramId("p0000001"),
        "backend_id": BackendId("a"),
        "model": ModelId("large"),
        "decision_id": DecisionId(0),
    } | changes
    return Dispatch(**facts)  # type: ignore[arg-type]


END = EndTurn(turn_id=1, outcome=TurnOutcome.FAILED, status=502, code="x", message="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("commands", "law"),
    [
        ([dispatch(), dispatch()], "L5"),
        ([dispatch(turn_id=99)], "L5"),
        ([dispatch(backend_id="zz")], "L5"),
        ([dispatch(backend_id="b")], "L5"),
        ([END, END], "L2"),
        ([msgspec.structs.replace(END, outcome=TurnOutcome.COMPLETED)], "L2"),
        ([END, dispatch()], "L5"),
    ],
)
def test_machines_that_break_laws_are_caught(commands: list[Command], law: str) -> None:
    """Two dispatches at once, unknown turns or backends, a second outcome: each is a broken law, not a shrug."""
    world = scenario()
    with pytest.raises(LawBroken, match=law):
        simulate(world, 1, machine=BrokenMachine(world.backends, commands=commands))


class AskingMachine(DirectMachine):
    """Asks the selector for every turn and goes where it says, or to the first backend."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, TurnArrived):
            self.waiting = event
            return [
                AskSelector(
                    decision_id=DecisionId(event.turn_id),
                    program_id=event.program_id,
                    candidates=("large", "small"),
                    context=(),
                    task_type=None,
                    domain=None,
                    timeout_s=1.0,
                )
            ]
        if isinstance(event, SelectorAnswered):
            self.events.append(event)
            i = ("large", "small").index(event.model) if event.model else 0
            return [self._send(msgspec.structs.replace(self.waiting, at_s=event.at_s), i, 1)]
        return super().handle(event)


@pytest.mark.parametrize(("answers", "models"), [("uniform", {"large", "small"}), ("error", {"large"})])
def test_selector_answers_as_told(answers: str, models: set[str]) -> None:
    """The world's selector answers after its delay, at random or with a failure."""
    world = scenario(
        workload={"arrivals": {"kind": "closed", "n_agents": 1}}, selector={"answers": answers, "delay_s": 0.25}
    )
    machine = AskingMachine(world.backends)
    report = simulate(world, 1, machine=machine)
    assert set(report.share) == models
    assert report.hold_mean_s == pytest.approx(0.25)


def test_cancelling_by_the_machine_is_answered() -> None:
    """A machine that takes an attempt back and ends the turn hears the attempt end as cancelled."""
    world = scenario(n_programs=1)
    commands = [dispatch(), CancelAttempt(turn_id=1, attempt=1), END]  # type: ignore[arg-type]
    machine = BrokenMachine(world.backends, commands=commands)
    report = simulate(world, 1, machine=machine)
    assert [e.outcome for e in ended(machine)] == [AttemptOutcome.CANCELLED]
    assert report.turns["failed"] == 1


def test_verify_in_the_batch_that_ends_the_program_is_heard() -> None:
    """A verifier asked for before the turn's end is carried out still judges the program."""
    world = scenario(n_programs=1)
    commands = [Verify(program_id=ProgramId("p0000001"), verifier="early"), END]
    machine = BrokenMachine(world.backends, commands=commands)
    simulate(world, 1, machine=machine)
    assert [e.verdict.verifier for e in machine.of(VerdictArrived)] == ["early"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    """Every example scenario runs to its end under its own stack, within the stack's holding limit."""
    world = load_scenario(path)
    world = msgspec.structs.replace(world, n_programs=min(world.n_programs or 100, 100))
    report = simulate(world, 1)
    assert report.programs.get("finished", 0) > 30
    assert report.programs["open"] == 0
    assert report.turns["open"] == 0


@pytest.mark.parametrize("name", ["crash", "two_models", "vllm_pair"])
def test_report_and_journal_are_the_same_bytes_under_any_hash_seed(name: str) -> None:
    """Law L6: three interpreters with different hash seeds print the same report and journal digest."""
    path = ROOT / "examples" / "scenarios" / f"{name}.yaml"
    printed = []
    for hash_seed in ("0", "1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, str(Path(__file__).parent / "print_report.py"), str(path), "7"]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300)
        printed.append(done.stdout)
    assert printed[0] == printed[1] == printed[2]
    assert b'"finished":' in printed[0]


def test_seeds_differ() -> None:
    """Another seed is another world."""
    assert run(scenario(), 1)[0].to_json() != run(scenario(), 2)[0].to_json()


def test_no_machine_room_can_see_the_simulator() -> None:
    """Law L8: no module of the rooms that machines are made of imports sim or emulator."""
    rooms = [
        ROOT / "src" / "loadwise" / room for room in ("kernel", "ledger", "policy", "verify", "router", "team", "mesh")
    ]
    modules = [path for room in rooms for path in room.rglob("*.py")]
    assert any("kernel" in path.parts for path in modules)
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{a.name}" for a in node.names]
            assert not any("sim" in name.split(".") or "emulator" in name.split(".") for name in names), path


class Mute:
    """A machine that never says anything."""

    def handle(self, event: Event) -> list[Command]:
        return []

    def check(self) -> None:
        return None


def test_l8_every_run_guards_what_the_machine_hears() -> None:
    """No fact that is no event, none of another instant, no length that no client asked for (law L8)."""
    spec = scenario()
    world = World(spec, Mute(), 1)
    turn = TurnArrived(at_s=0.0, turn_id=TurnId(1), program_id=ProgramId("p"), prompt_tokens=3)
    signals = SignalsObserved(at_s=0.0, backend_id=BackendId("a"), values={}, observed_at_s=0.0)
    for event in (turn, signals):
        world.feed(event)
    later = msgspec.structs.replace(signals, observed_at_s=1.0)
    for wrong in (msgspec.structs.replace(turn, at_s=1.0), msgspec.structs.replace(turn, max_output_tokens=77), later):
        with pytest.raises(LawBroken, match="L8"):
            world.feed(wrong)
    with pytest.raises(LawBroken, match="L8"):
        world.feed(spec.truth)  # type: ignore[arg-type]


def test_l1_every_token_that_an_engine_counts_was_heard() -> None:
    """At the end of a run, of every engine since it last started (law L1)."""
    spec = scenario(failures=[{"at_s": 5, "backend": "a", "kind": "crash", "for_s": 3}])
    world = World(spec, DirectMachine(spec.backends), 1)
    world.run()
    backend = world.fleet.backends["b"]
    backend._heard_tokens -= 1
    with pytest.raises(LawBroken, match="engine of 'b' said"):
        world.check()


def test_events_say_nothing_about_truth() -> None:
    """Law L8: before its verdict no event of a program differs with its true success or true output length."""
    fields = set(TurnArrived.__struct_fields__)
    assert not fields & {"output_tokens", "success", "luck", "is_solved"}
    easy, hard = scenario(truth={"success": {"large": {"*": 1.0}}}), scenario(truth={"success": {"large": {"*": 0.0}}})
    kinds = (VerdictArrived,)
    seen = []
    for world in (easy, hard):
        _, machine = run(world, choose=to(0))
        seen.append([event for event in machine.events if not isinstance(event, kinds)])
    n = min(len(events) for events in seen)
    assert [e for e in seen[0][:n] if e.at_s < 40] == [e for e in seen[1][:n] if e.at_s < 40]
