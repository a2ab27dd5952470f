"""The demo's course: one row per policy, each on a fresh pool and gateway, all on one stream with one luck.

Whoever calls brings the two things that touch the outside: `start_pool` and `start_gateway`. The routed row
runs first, because the mixing row repeats its shares without looking at the task; then uniform mixing, then
every model alone. Each row is served by the same gateway code on the same kind of pool; only its policy
differs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import msgspec

from loadwise import __version__
from loadwise.demo.agent import OUTPUT_MAX_TOKENS, finish_program, open_client, report_verdict, run_program
from loadwise.demo.compare import DRAWS, Comparison, Gain, Row, TaskOutcome, compare, summarize
from loadwise.demo.grade import grade
from loadwise.demo.script import scripted
from loadwise.demo.table import SuccessTable, UsdPerMillion, packaged_table
from loadwise.demo.task import LEVELS, Task
from loadwise.demo.tasks import TASKS_MAX, generate_tasks
from loadwise.emulator.script import Script
from loadwise.kernel.errors import ConfigError, Error
from loadwise.kernel.fact import Fact

ROUTED = "loadwise"
RANDOM = "random"
MIXING = "mixing"
CONCURRENCY_MAX = 256
_ERRORS_KEPT = 20


class DemoFailed(Error):
    """The demo cannot go on; the message says which row and why."""


class RowPlan(Fact, frozen=True, kw_only=True):
    """What the gateway of one row is asked to do."""

    label: str
    """The row's name in the table: loadwise, random, mixing or fixed:MODEL."""
    policy: Literal["loadwise", "random", "mixing", "fixed"]
    shares: dict[str, float]
    """Probability of each model: 1 for the model of a fixed row; empty for the routed row, which decides."""
    seed: int
    """Seed of the gateway's own chance; differs between rows, unlike the tasks' luck."""


class DemoOptions(Fact, frozen=True, kw_only=True):
    """What a user may set."""

    n_programs: int = 160
    """Programs per row, 1..TASKS_MAX."""
    concurrency: int = 8
    """Programs under way at once, 1..CONCURRENCY_MAX."""
    levels: int = LEVELS
    """Hardest difficulty of the tasks, 1..LEVELS."""
    seed: int = 0
    """Any integer: names the tasks, the luck and the bootstrap."""
    prices: dict[str, UsdPerMillion] = {}
    """The pool's models with their prices; empty means the emulated ones of the success table."""
    wait_scale: float = 1.0
    """Seconds of emulated time in one second of the clock; a reported wait is multiplied by it."""
    request_timeout_s: float = 60.0
    output_max_tokens: int = OUTPUT_MAX_TOKENS
    """Bound on each reply; small for slow real models."""
    draws: int = DRAWS

    def __post_init__(self) -> None:
        limits = (
            ("n_programs", self.n_programs, TASKS_MAX),
            ("concurrency", self.concurrency, CONCURRENCY_MAX),
            ("levels", self.levels, LEVELS),
            ("draws", self.draws, 100_000),
            ("output_max_tokens", self.output_max_tokens, 100_000),
        )
        for name, value, most in limits:
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}: it must lie between 1 and {most}")
        for name, seconds in (("wait_scale", self.wait_scale), ("request_timeout_s", self.request_timeout_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name} is {seconds}: it must be finite and above 0")


class LiveState(Fact, frozen=True, kw_only=True):
    """How far the demo is: what the live table shows."""

    models: tuple[str, ...]
    finished: tuple[Row, ...]
    """Rows that are over, in order."""
    current: Row | None
    """The running row so far; None before its first program ended."""
    label: str
    n_done: int
    n_programs: int
    n_rows: int
    n_errors: int
    """Programs of the running row with at least one error."""


class DemoResult(Fact, frozen=True, kw_only=True):
    """What the demo found."""

    options: DemoOptions
    models: tuple[str, ...]
    emulated: bool
    comparison: Comparison
    elapsed_s: dict[str, float]
    """Seconds of the clock by row."""
    errors: tuple[str, ...]
    """The first errors of programs, by row and program."""
    n_errors: int


StartPool: TypeAlias = Callable[[Script], AbstractContextManager[Any]]
"""Start the pool and stop it at exit. An emulated pool answers with the script; a real one ignores it."""

StartGateway: TypeAlias = Callable[[Any, RowPlan], AbstractContextManager[str]]
"""Start a fresh gateway over a started pool with a row's policy; gives its base address ending in /v1."""

Report: TypeAlias = Callable[[LiveState], None]
"""Called after every program, one call at a time; must return at once."""


def run_demo(
    options: DemoOptions,
    start_pool: StartPool,
    start_gateway: StartGateway,
    report: Report = lambda state: None,
    table: SuccessTable | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DemoResult:
    """Run every row and compare them.

    Raises:
        DemoFailed: no program of a row got an answer.
    """
    table = table or packaged_table()
    emulated = not options.prices
    prices = options.prices or {name: model.usd_per_million for name, model in table.models.items()}
    tasks = generate_tasks(options.n_programs, options.seed, options.levels)
    script = scripted(tasks, table, options.seed)
    course = _Course(options, prices, tasks, report)
    elapsed_s: dict[str, float] = {}

    def run(plan: RowPlan) -> None:
        began_at_s = clock()
        with start_pool(script) as pool, start_gateway(pool, plan) as base_url:
            course.run_row(plan, base_url)
        elapsed_s[plan.label] = clock() - began_at_s

    run(_plan(options, ROUTED, "loadwise", {}))
    run(_plan(options, RANDOM, "random", {model: 1.0 / len(prices) for model in prices}))
    run(_plan(options, MIXING, "mixing", _normalized(course.rows[ROUTED], prices)))
    singles = {model: f"fixed:{model}" for model in prices}
    for model, label in singles.items():
        run(_plan(options, label, "fixed", {model: 1.0}))
    return DemoResult(
        options=options,
        models=tuple(prices),
        emulated=emulated,
        comparison=compare(course.rows, singles, ROUTED, RANDOM, options.seed, options.draws),
        elapsed_s=elapsed_s,
        errors=tuple(course.errors),
        n_errors=course.n_errors,
    )


def to_json(result: DemoResult) -> dict[str, Any]:
    """Lay the result out as INTERFACES has it; costs and waits are means per program."""
    comparison = result.comparison

    def plain(gain: Gain) -> dict[str, Any]:
        return {"gain_pp": gain.pp, "ci95": list(gain.ci95)}

    return {
        "name": "demo",
        "version": __version__,
        "seed": result.options.seed,
        "n_programs": result.options.n_programs,
        "emulated": result.emulated,
        "rows": [msgspec.to_builtins(row) for row in comparison.rows],
        **plain(comparison.gain_over_frontier),
        "gains": {
            "over_mixing_frontier": plain(comparison.gain_over_frontier),
            "over_mixing_at_same_shares": plain(comparison.gain_at_same_shares),
            "over_uniform_mixing": plain(comparison.gain_over_random),
        },
        "luck_mismatches": comparison.luck_mismatches,
        "n_errors": result.n_errors,
        "errors": list(result.errors),
        "elapsed_s": result.elapsed_s,
    }


def _plan(
    options: DemoOptions,
    label: str,
    policy: Literal["loadwise", "random", "mixing", "fixed"],
    shares: dict[str, float],
) -> RowPlan:
    return RowPlan(label=label, policy=policy, shares=shares, seed=options.seed)


def _normalized(outcomes: Sequence[TaskOutcome], models: Mapping[str, object]) -> dict[str, float]:
    """Read the routed row's shares as probabilities; uniform if none of its programs was served."""
    counts = {model: sum(outcome.model == model for outcome in outcomes) for model in models}
    n = sum(counts.values())
    return {model: count / n if n else 1.0 / len(counts) for model, count in counts.items()}


class _Course:
    """Runs rows one after the other and keeps what came out."""

    def __init__(
        self,
        options: DemoOptions,
        prices: Mapping[str, UsdPerMillion],
        tasks: Sequence[Task],
        report: Report,
    ) -> None:
        self._options = options
        self._prices = prices
        self._tasks = tasks
        self._report = report
        self._lock = threading.Lock()
        self.rows: dict[str, list[TaskOutcome]] = {}
        self.errors: list[str] = []
        self.n_errors = 0
        self._n_row_errors = self._n_answered = 0

    def run_row(self, plan: RowPlan, base_url: str) -> None:
        """Run the whole stream through one gateway with bounded concurrency."""
        self.rows[plan.label] = []
        self._n_row_errors = self._n_answered = 0
        executor = ThreadPoolExecutor(self._options.concurrency, thread_name_prefix="demo-agent")
        with open_client(base_url, timeout_s=self._options.request_timeout_s) as client:
            try:
                futures = [executor.submit(self._run_one, client, plan, task) for task in self._tasks]
                _first_failure(futures)
            finally:
                executor.shutdown(wait=True, cancel_futures=True)
        self._check_alive(plan, at_end=True)

    def _run_one(self, client: Any, plan: RowPlan, task: Task) -> None:
        program_id = f"demo-{plan.label.replace(':', '-')}-{task.task_id}"
        metadata = {"task_type": task.family, "domain": task.family}
        transcript = run_program(
            client, task, "auto", program_id, metadata, output_max_tokens=self._options.output_max_tokens
        )
        passed = grade(task, transcript.answer_text).verdict
        # No answer because something broke says nothing about the model, so the learner gets no verdict.
        unheard = bool(transcript.errors) and not transcript.answer_text
        verdict = "abstain" if unheard else passed
        told = (finish_program(client, program_id), report_verdict(client, program_id, verdict))
        errors = (*transcript.errors, *(error for error in told if error))
        price = self._prices.get(transcript.model)
        if price is None and transcript.n_turns:
            errors = (*errors, f"model {transcript.model!r} is not one of {sorted(self._prices)}")
        outcome = TaskOutcome(
            task_id=task.task_id,
            family=task.family,
            model=transcript.model if price else "",
            success=float(passed == "pass"),
            cost_usd=price.cost_usd(transcript.input_tokens, transcript.output_tokens) if price else 0.0,
            wait_s=transcript.wait_s * self._options.wait_scale,
        )
        self._keep(plan, program_id, outcome, errors, answered=transcript.n_turns > 0)

    def _keep(
        self, plan: RowPlan, program_id: str, outcome: TaskOutcome, errors: Sequence[str], *, answered: bool
    ) -> None:
        """Count one ended program."""
        with self._lock:
            self.rows[plan.label].append(outcome)
            self._n_answered += answered
            if errors:
                self.n_errors += 1
                self._n_row_errors += 1
                if len(self.errors) < _ERRORS_KEPT:
                    self.errors.append(f"{program_id}: {'; '.join(errors)}")
            self._check_alive(plan, at_end=False)
            self._report(self._state(plan))

    def _check_alive(self, plan: RowPlan, *, at_end: bool) -> None:
        """Give up when nothing answers, rather than wait for every program's timeout."""
        enough = at_end or len(self.rows[plan.label]) >= 2 * self._options.concurrency
        if enough and self._n_answered == 0:
            why = self.errors[-1] if self.errors else "no error was reported"
            raise DemoFailed(f"row {plan.label!r}: no program got an answer; last error: {why}")

    def _state(self, plan: RowPlan) -> LiveState:
        *before, last = self.rows.items()
        return LiveState(
            models=tuple(self._prices),
            finished=tuple(summarize(label, outcomes) for label, outcomes in before),
            current=summarize(*last),
            label=plan.label,
            n_done=len(last[1]),
            n_programs=len(self._tasks),
            n_rows=3 + len(self._prices),
            n_errors=self._n_row_errors,
        )


def _first_failure(futures: Sequence[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
