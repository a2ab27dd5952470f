"""The demo's course over a fake pool and gateway: real SDK, real agents, real HTTP on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from demo_gateway import FakeGateway, by_plan, fake_gateway

from loadwise.demo.compare import TaskOutcome
from loadwise.demo.grade import grade
from loadwise.demo.run import DemoFailed, DemoOptions, DemoResult, LiveState, RowPlan, run_demo, to_json
from loadwise.demo.script import solves
from loadwise.demo.table import UsdPerMillion, packaged_table
from loadwise.demo.tasks import generate_tasks
from loadwise.emulator.script import Reply, Script
from loadwise.kernel.errors import ConfigError

OPTIONS = DemoOptions(n_programs=20, concurrency=4, seed=6, draws=100)


class Stage:
    """Starts fakes for the demo and remembers them."""

    def __init__(self) -> None:
        self.plans: list[RowPlan] = []
        self.gateways: list[FakeGateway] = []
        self.log: list[str] = []
        self.states: list[LiveState] = []

    @contextmanager
    def start_pool(self, script: Script) -> Iterator[Script]:
        self.log.append("pool up")
        try:
            yield script
        finally:
            self.log.append("pool down")

    @contextmanager
    def start_gateway(self, pool: Script, plan: RowPlan) -> Iterator[str]:
        self.plans.append(plan)
        with fake_gateway(pool, by_plan(plan)) as server:
            self.gateways.append(server)
            self.log.append(f"gateway up {plan.label}")
            yield server.base_url
        self.log.append("gateway down")

    def run(self, options: DemoOptions = OPTIONS) -> DemoResult:
        ticks = iter(range(1_000))
        return run_demo(
            options, self.start_pool, self.start_gateway, self.states.append, clock=lambda: float(next(ticks))
        )


@pytest.fixture(scope="module")
def played() -> tuple[Stage, DemoResult]:
    stage = Stage()
    return stage, stage.run()


def test_every_row_runs_on_its_own_pool_and_gateway(played: tuple[Stage, DemoResult]) -> None:
    """Routed, uniform, same shares, then each model alone; each started and stopped before the next."""
    stage, result = played
    labels = ["loadwise", "random", "mixing", "fixed:small", "fixed:medium", "fixed:large"]
    assert [row.policy for row in result.comparison.rows] == labels
    expected = [["pool up", f"gateway up {label}", "gateway down", "pool down"] for label in labels]
    assert stage.log == [step for steps in expected for step in steps]
    assert result.elapsed_s == dict.fromkeys(labels, 1.0)
    assert [plan.policy for plan in stage.plans] == ["loadwise", "random", "mixing", "fixed", "fixed", "fixed"]
    assert stage.plans[1].shares == pytest.approx(dict.fromkeys(("small", "medium", "large"), 1 / 3))
    assert stage.plans[2].shares == {"small": 0.5, "medium": 0.25, "large": 0.25}
    assert stage.plans[5].shares == {"large": 1.0}


def test_every_row_meets_the_same_luck(played: tuple[Stage, DemoResult]) -> None:
    """A single model's row succeeds on exactly the tasks that the luck of (seed, task, model) names."""
    _, result = played
    table, tasks = packaged_table(), generate_tasks(20, 6)
    for row in result.comparison.rows[3:]:
        model = row.policy.removeprefix("fixed:")
        assert row.success == sum(solves(task, model, table, 6) for task in tasks) / 20
        assert row.share == {model: 1.0}
    assert result.comparison.luck_mismatches == 0
    assert result.n_errors == 0


def test_every_program_ends_with_a_verdict(played: tuple[Stage, DemoResult]) -> None:
    """Each program is finished, then judged, once; ids are unique over the whole demo."""
    stage, _ = played
    seen: set[str] = set()
    for gateway in stage.gateways:
        posts: dict[str, list[str]] = {}
        for path, body in gateway.posts:
            program, verb = path.removeprefix("/v1/programs/").split("/")
            posts.setdefault(program, []).append(verb)
            assert verb != "verdict" or body["verdict"] in ("pass", "fail")
        assert set(posts) == set(gateway.model_by_program) and len(posts) == 20
        assert all(verbs == ["finish", "verdict"] for verbs in posts.values())
        assert not seen & set(posts)
        seen |= set(posts)


def test_verdicts_are_the_graders(played: tuple[Stage, DemoResult]) -> None:
    """What the gateway hears is what the table counts."""
    stage, result = played
    for gateway, row in zip(stage.gateways, result.comparison.rows, strict=True):
        passed = sum(body.get("verdict") == "pass" for _, body in gateway.posts)
        assert row.success == passed / 20


def test_the_demo_can_be_repeated(played: tuple[Stage, DemoResult]) -> None:
    """The same seed gives the same comparison, however threads interleave; another gives another."""
    _, result = played
    assert Stage().run().comparison == result.comparison
    other = msgspec.structs.replace(OPTIONS, seed=-(10**25))
    assert Stage().run(other).comparison != result.comparison


def test_the_live_state_counts_up(played: tuple[Stage, DemoResult]) -> None:
    """One report per program, growing within a row, ending with all rows."""
    stage, result = played
    assert [state.n_done for state in stage.states] == [*range(1, 21)] * 6
    assert stage.states[-1].current == result.comparison.rows[-1]
    assert [row.policy for row in stage.states[-1].finished] == [row.policy for row in result.comparison.rows[:-1]]


def test_json_has_what_interfaces_asks(played: tuple[Stage, DemoResult]) -> None:
    """rows [{policy, success, cost_usd, wait_s, share}], gain_pp, ci95; survives an encoder."""
    out = msgspec.json.decode(msgspec.json.encode(to_json(played[1])))
    assert out["name"] == "demo" and out["emulated"] is True
    for row in out["rows"]:
        assert set(row) == {"policy", "success", "cost_usd", "wait_s", "share"}
        assert sum(row["share"].values()) == pytest.approx(1.0)
        assert row["cost_usd"] > 0 and row["wait_s"] > 0
    low, high = out["ci95"]
    assert low <= high and isinstance(out["gain_pp"], float)
    assert out["gains"]["over_mixing_frontier"] == {"gain_pp": out["gain_pp"], "ci95": out["ci95"]}


def test_waits_are_scaled_and_costs_are_priced() -> None:
    """Emulated waits are multiplied by the scale; given prices replace the table's."""
    prices = dict.fromkeys(("small", "medium", "large"), UsdPerMillion(input=1e6, output=0.0))
    options = msgspec.structs.replace(OPTIONS, wait_scale=100.0, prices=prices)
    result = Stage().run(options)
    row = result.comparison.rows[3]
    assert row.wait_s > 1.0 and row.cost_usd >= 40.0
    assert not result.emulated


def test_a_dead_gateway_ends_the_demo_early() -> None:
    """When nothing answers the demo stops with the reason instead of trying every program."""
    stage = Stage()

    @contextmanager
    def start_gateway(pool: Any, plan: RowPlan) -> Iterator[str]:
        with stage.start_gateway(pool, plan) as base_url:
            stage.gateways[-1].refuse = lambda body: 503
            yield base_url

    options = msgspec.structs.replace(OPTIONS, n_programs=200)
    with pytest.raises(DemoFailed, match=r"row 'loadwise': no program got an answer.*refused with 503"):
        run_demo(options, stage.start_pool, start_gateway)
    assert len(stage.gateways[0].bodies) < 40
    assert stage.log[-1] == "pool down"


def test_some_failures_are_counted_and_abstained_from() -> None:
    """A program whose engine broke counts as a failure in the table, and the learner hears no judgement."""
    stage = Stage()

    @contextmanager
    def start_gateway(pool: Any, plan: RowPlan) -> Iterator[str]:
        with stage.start_gateway(pool, plan) as base_url:
            gateway = stage.gateways[-1]
            gateway.refuse = lambda body: 503 if body["metadata"]["task_type"] == "dates" else None
            yield base_url

    result = run_demo(OPTIONS, stage.start_pool, start_gateway)
    verdicts = [body["verdict"] for _, body in stage.gateways[0].posts if "verdict" in body]
    assert verdicts.count("abstain") == 5
    assert result.n_errors == 6 * 5 and "503" in result.errors[0]
    assert sum(result.comparison.rows[0].share.values()) == pytest.approx(0.75)
    assert "medium" not in stage.plans[2].shares or stage.plans[2].shares["medium"] == 0.0


def test_a_model_of_no_price_is_an_error_and_no_row() -> None:
    """A gateway that names a model outside the pool is reported; the program has no model and no cost."""
    stage = Stage()

    @contextmanager
    def start_gateway(pool: Any, plan: RowPlan) -> Iterator[str]:
        with fake_gateway(lambda body: Reply(text="Answer: 1", output_tokens=1), lambda b, p: "ghost") as server:
            yield server.base_url

    result = run_demo(OPTIONS, stage.start_pool, start_gateway)
    assert result.comparison.rows[0].share == {}
    assert "model 'ghost' is not one of ['large', 'medium', 'small']" in result.errors[0]


@pytest.mark.parametrize(
    "change",
    [
        {"n_programs": 0},
        {"n_programs": 10_001},
        {"concurrency": 0},
        {"draws": 0},
        {"levels": 6},
        {"wait_scale": 0.0},
        {"wait_scale": float("nan")},
        {"request_timeout_s": float("inf")},
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any]) -> None:
    """The message names the option and its value."""
    name, value = next(iter(change.items()))
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        DemoOptions(**change)


def test_outcomes_are_graded_by_text_alone() -> None:
    """An outcome carries no text: what a program said is judged before it is kept."""
    assert "answer_text" not in TaskOutcome.__struct_fields__
    assert grade(generate_tasks(1, 0)[0], "").verdict == "fail"


def test_importing_the_demo_loads_no_web_library() -> None:
    """The SDK is loaded when a client is opened, so `loadwise --help` does not pay for it."""
    code = "import sys, loadwise.demo.run; print([m for m in ('openai', 'httpx', 'rich', 'torch') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
