"""What the demo shows: a live table while it runs, the result at its end. The caller owns the consoles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadwise.demo.compare import Gain, Row
from loadwise.demo.run import DemoResult, LiveState

# Shares in the second are those that the routed row ended with.
_NAMES = {"random": "random mixing", "mixing": "same-share mixing"}
_LINES_PER_ROW = 5
PROGRAMS_MIN = 40
"""Programs a row below which a bootstrap over tasks is no interval."""


def render_state(state: LiveState) -> RenderableType:
    """Draw the rows that are over and the one that runs."""
    table = _table(state.models, f"row {len(state.finished) + 1} of {state.n_rows}")
    for row in state.finished:
        _add(table, row, str(state.n_programs), state.models)
    if state.current is not None:
        _add(table, state.current, f"{state.n_done}/{state.n_programs}", state.models, style="bold")
    if state.n_errors:
        return Group(table, Text(f"{state.n_errors} programs of this row met an error", style="red"))
    return table


def render_result(result: DemoResult) -> RenderableType:
    """Draw the whole comparison with its gains."""
    kind = "emulated models" if result.emulated else "real models"
    n = result.options.n_programs
    title = f"{n} programs a row, seed {result.options.seed}, {kind}: same tasks and same luck in every row"
    table = _table(result.models, title)
    for row in result.comparison.rows:
        _add(table, row, str(n), result.models, style="bold" if row.policy == "loadwise" else "")
    return Group(table, Text("\n".join(gain_lines(result))))


def gain_lines(result: DemoResult) -> tuple[str, ...]:
    """Say in words what was gained or lost, with intervals, and what to doubt."""
    comparison = result.comparison
    if len(result.models) == 1:
        lines = ["one model: there is nothing to choose, so there is no gain; differences between rows are chance"]
    elif result.options.n_programs < PROGRAMS_MIN:
        lines = [f"fewer than {PROGRAMS_MIN} programs a row say nothing of a gain; --n sets how many"]
    else:
        lines = [
            f"gain over random mixing at the same cost:   {_gain(comparison.gain_over_frontier)}",
            f"gain over random mixing at the same shares: {_gain(comparison.gain_at_same_shares)}",
            f"gain over uniform random mixing:            {_gain(comparison.gain_over_random)}",
        ]
    if comparison.luck_mismatches:
        lines.append(
            f"{comparison.luck_mismatches} (task, model) pairs ended differently in two rows: "
            "the rows are not fully paired"
        )
    if result.n_errors:
        lines.append(f"{result.n_errors} programs met an error, first: {result.errors[0]}")
    return tuple(lines)


def plain_line(state: LiveState) -> str:
    """Say in one line how far the running row is."""
    row = state.current
    if row is None:
        return f"{state.label}: starting"
    shares = " ".join(f"{model}={row.share.get(model, 0.0):.0%}" for model in state.models)
    errors = f", {state.n_errors} with errors" if state.n_errors else ""
    return (
        f"{state.label}: {state.n_done}/{state.n_programs} programs, {shares}, success {row.success:.1%}, "
        f"${1000 * row.cost_usd:.3f} per 1000, wait {row.wait_s:.2f} s{errors}"
    )


class LiveView:
    """Shows states as they come: a table that redraws itself on a terminal, else a few lines per row.

    `update` may be called from any thread, one call at a time.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state: LiveState | None = None
        self._live = (
            Live(get_renderable=self._renderable, console=console, refresh_per_second=6, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, state: LiveState) -> None:
        """Take the newest state."""
        self._state = state
        if self._live is None and _is_milestone(state):
            self._console.print(plain_line(state), highlight=False, markup=False, soft_wrap=True)

    def _renderable(self) -> RenderableType:
        return render_state(self._state) if self._state is not None else Text("starting the pool")


def _is_milestone(state: LiveState) -> bool:
    step = max(1, state.n_programs // _LINES_PER_ROW)
    return state.n_done % step == 0 or state.n_done == state.n_programs


def _table(models: Iterable[str], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("programs", justify="right", no_wrap=True)
    for model in models:
        table.add_column(Text(model), justify="right")
    for name in ("success", "$/1000", "wait s"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, row: Row, programs: str, models: Sequence[str], style: str = "") -> None:
    name = _NAMES.get(row.policy, row.policy.replace("fixed:", "only "))
    shares = (f"{row.share.get(model, 0.0):.0%}" for model in models)
    figures = (f"{row.success:.1%}", f"{1000 * row.cost_usd:.3f}", f"{row.wait_s:.2f}")
    table.add_row(Text(name), programs, *shares, *figures, style=style)


def _gain(gain: Gain) -> str:
    return f"{gain.pp:+.1f} pp  (95 % from {gain.ci95[0]:+.1f} to {gain.ci95[1]:+.1f})"
