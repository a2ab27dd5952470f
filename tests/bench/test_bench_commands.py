"""The bench commands themselves: refusals, flat memory told from growing memory, and what an import drags in."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import yaml

from bench import gateway, import_time, journal, linear, memory, result, under_test, wrk
from bench.load import Endpoint
from bench.memory import Span, World
from loadwise.kernel.commands import Command, Dispatch, SetTimer, Verify
from loadwise.kernel.events import AttemptEnded, Event, ProgramEnded, TimerFired, TurnArrived, VerdictArrived
from loadwise.kernel.ids import BackendId, DecisionId, ModelId


def test_an_unknown_peer_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error does not become a comparison without peers."""
    with pytest.raises(SystemExit) as ended:
        gateway.main(["--peer", "smgg"])
    assert ended.value.code == 2
    assert "unknown peer 'smgg'; known are litellm, smg" in capsys.readouterr().err


def test_no_runs_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A median of nothing is not asked for."""
    with pytest.raises(SystemExit):
        gateway.main(["--runs", "0"])
    assert "--runs is 0" in capsys.readouterr().err


@pytest.mark.parametrize(("bench", "bounds"), [(journal, journal.BOUNDS), (linear, linear.BOUNDS_US)])
def test_benches_of_one_part_print_the_object_that_all_print(
    bench: ModuleType, bounds: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every check that they name, whichever holds."""
    values = {key: bound + n for n, (key, bound) in enumerate(bounds.items())}
    monkeypatch.setattr(bench, "measure", lambda *_: values)
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--json"])
    bench.main()
    said = json.loads(capsys.readouterr().out)
    assert set(said) == set(result.build("any", values={}, config={}))
    assert said["values"] == values and "load_average" in said["config"]
    assert [(one["key"], one["holds"]) for one in said["checks"]] == [(key, n == 0) for n, key in enumerate(bounds)]


def test_without_wrk_the_bench_says_so_and_prints_no_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit status of 0 means that it ran."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert gateway.main(["--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "wrk is not installed" in said.err


def test_answers_that_cannot_have_been_whole_count_as_an_error() -> None:
    """Fewer bytes than the answers have is an error; partial answers at the end only add bytes."""
    met = wrk.Counted(requests=100, duration_us=1, bytes=98_000, connect=0, read=0, write=0, status=0, timeout=0)
    assert gateway.cut_short(met, 1001) == 1
    assert gateway.cut_short(met, 1000) == 0
    assert gateway.cut_short(met, 900) == 0


def test_a_slow_gateway_is_measured_for_eight_rounds_and_a_fast_one_as_planned() -> None:
    """What two seconds would cut off is given its time, within a limit."""
    assert [gateway.wrk_s(2, round_s) for round_s in (0.01, 0.25, 1.5, 60.0)] == [2, 2, 12, gateway.WRK_MAX_S]


def test_new_programs_are_new_and_end_with_their_turn() -> None:
    """No two first turns are of one program, within a supply and between supplies."""
    endpoint = Endpoint(name="e", port=1, model="auto")
    supplies = [gateway._new_programs(endpoint) for _ in range(2)]
    turns = [next(supply) for supply in supplies for _ in range(3)]
    ids = {turn.partition(b"X-Session-ID: ")[2].split(b"\r\n")[0] for turn in turns}
    assert len(ids) == 6
    assert all(b"X-Loadwise-Final: 1\r\n" in turn for turn in turns)


def test_the_pool_of_the_bench_has_three_models_on_one_engine() -> None:
    """There is something to choose, and each choice costs the engine the same."""
    text = under_test.POOL.format(engine_url="http://127.0.0.1:1", port=2, embedder="hash", journal="j")
    pool = yaml.safe_load(text)
    assert pool["gateway"] == {"port": 2, "journal": "j", "embedder": "hash"}
    assert len(pool["models"]) == 3
    assert [backend["model"] for backend in pool["backends"]] == list(pool["models"])
    assert {backend["url"] for backend in pool["backends"]} == {"http://127.0.0.1:1/v1"}


class Scripted:
    """A stack that dispatches each turn, verifies each program and keeps what it is told to keep."""

    def __init__(self, keep: Callable[[Event], bool]) -> None:
        self.events: list[Event] = []
        self._keep = keep

    def handle(self, event: Event) -> list[Command]:
        """Answer as a router would."""
        if self._keep(event):
            self.events.append(event)
        if isinstance(event, TurnArrived):
            return [
                Dispatch(
                    turn_id=event.turn_id,
                    attempt=1,
                    program_id=event.program_id,
                    backend_id=BackendId("a"),
                    model=ModelId("small"),
                    decision_id=DecisionId(1),
                ),
                SetTimer(timer="idle", fires_at_s=event.at_s + 1.5 * memory.BETWEEN_PROGRAMS_S),
            ]
        if isinstance(event, ProgramEnded):
            return [Verify(program_id=event.program_id, verifier="exact")]
        return []


def test_the_smallest_world_finishes_each_program() -> None:
    """Every turn is answered, every program ends once and is judged, and time never falls."""
    stack = Scripted(keep=lambda event: True)
    world = World(stack.handle)
    for _ in range(5):
        world.program()

    def count(kind: type) -> int:
        return sum(isinstance(event, kind) for event in stack.events)

    assert (count(TurnArrived), count(AttemptEnded)) == (5 * memory.TURNS, 5 * memory.TURNS)
    assert (count(ProgramEnded), count(VerdictArrived)) == (5, 10)
    times = [event.at_s for event in stack.events]
    assert times == sorted(times)


def test_a_timer_that_is_set_again_fires_once_at_its_last_instant() -> None:
    """Each program moves the one timer on, so only the last setting fires."""
    stack = Scripted(keep=lambda event: isinstance(event, TimerFired))
    world = World(stack.handle)
    world.program()
    world.program()
    assert stack.events == []
    world.now_s += 10.0
    world.program()
    assert [event.at_s for event in stack.events] == [world.now_s]


def test_growth_is_read_at_both_ends_of_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that keeps every ending is seen to grow by just what it keeps."""
    stack = Scripted(keep=lambda event: isinstance(event, ProgramEnded))
    monkeypatch.setattr(memory, "settled_bytes", lambda: 1000 + len(stack.events))
    found = memory.measure(World(stack.handle), Span(first=20, last=60, readings=4))
    assert found == {20: 1020, 30: 1030, 40: 1040, 50: 1050, 60: 1060}


def test_an_import_is_timed_in_a_python_of_its_own() -> None:
    """What the child loads is what is reported, not what this process has loaded."""
    took_s, loaded = import_time.time_once("import wave")
    assert took_s > 0
    assert "wave" in loaded and "pytest" not in loaded


def test_a_heavy_package_is_found_among_what_was_loaded() -> None:
    """Only whole names count."""
    assert import_time.heavy(["torch", "torchlike", "httpx", "numpy"]) == ["httpx", "torch"]


def test_importing_loadwise_loads_no_web_library_and_no_torch() -> None:
    """Neither the bare import nor what it loads later, when a stack is opened, pays for the rest."""
    _, loaded = import_time.time_once(import_time.OPEN)
    assert import_time.heavy(loaded) == []
