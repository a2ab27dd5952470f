"""What the demo shows."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from loadwise.demo.compare import Comparison, Gain, Row
from loadwise.demo.render import LiveView, gain_lines, plain_line, render_result, render_state
from loadwise.demo.run import DemoOptions, DemoResult, LiveState

ROW = Row(policy="loadwise", success=0.5, cost_usd=0.00012, wait_s=0.4, share={"small": 0.75, "large": 0.25})
FIXED = Row(policy="fixed:large", success=0.7, cost_usd=0.0002, wait_s=1.0, share={"large": 1.0})
STATE = LiveState(
    models=("small", "large"),
    finished=(FIXED,),
    current=ROW,
    label="loadwise",
    n_done=40,
    n_programs=200,
    n_rows=5,
    n_errors=0,
)


def gain(pp: float, low: float, high: float) -> Gain:
    return Gain(pp=pp, ci95=(low, high))


RESULT = DemoResult(
    options=DemoOptions(n_programs=200, seed=3),
    models=("small", "large"),
    emulated=True,
    comparison=Comparison(
        rows=(ROW, FIXED),
        gain_over_frontier=gain(-1.25, -6.0, 3.0),
        gain_at_same_shares=gain(2.0, 0.5, 4.0),
        gain_over_random=gain(0.0, -1.0, 1.0),
        luck_mismatches=0,
    ),
    elapsed_s={"loadwise": 1.0},
    errors=(),
    n_errors=0,
)


def drawn(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_table_shows_programs_shares_success_cost_and_wait() -> None:
    """Finished rows and the running one stand below each other, with progress."""
    text = drawn(render_state(STATE))
    for figure in ("row 2 of 5", "40/200", "75%", "25%", "50.0%", "0.120", "0.40", "only large", "70.0%"):
        assert figure in text
    assert "error" not in text


def test_errors_are_shown() -> None:
    """Programs that met an error are counted under the table and in the plain line."""
    state = msgspec.structs.replace(STATE, n_errors=3)
    assert "3 programs of this row met an error" in drawn(render_state(state))
    assert "3 with errors" in plain_line(state)


def test_a_negative_gain_is_printed_plainly() -> None:
    """The sign and the interval stand there whatever they say."""
    lines = gain_lines(RESULT)
    assert lines[0].endswith("-1.2 pp  (95 % from -6.0 to +3.0)")
    assert lines[1].endswith("+2.0 pp  (95 % from +0.5 to +4.0)")
    assert len(lines) == 3
    assert lines[0] in drawn(render_result(RESULT))


def test_doubts_are_said() -> None:
    """Unpaired luck and errors are named below the gains."""
    doubted = msgspec.structs.replace(RESULT.comparison, luck_mismatches=4)
    result = msgspec.structs.replace(RESULT, comparison=doubted, errors=("p: boom",), n_errors=2)
    assert "4 (task, model) pairs" in gain_lines(result)[3]
    assert gain_lines(result)[4] == "2 programs met an error, first: p: boom"


def test_the_result_fits_eighty_columns() -> None:
    """Three models with shares, success, cost and wait are readable on a narrow terminal."""
    models = ("small", "medium", "large")
    row = msgspec.structs.replace(ROW, share=dict.fromkeys(models, 1 / 3), policy="mixing")
    comparison = msgspec.structs.replace(RESULT.comparison, rows=(row,))
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_result(msgspec.structs.replace(RESULT, models=models, comparison=comparison)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text and "medium" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_terminal_a_few_plain_lines_are_printed() -> None:
    """A log gets five lines per row, not a redrawn table."""
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console) as view:
        for n_done in range(1, 201):
            view.update(msgspec.structs.replace(STATE, n_done=n_done))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("loadwise: 40/200 programs, small=75% large=25%, success 50.0%")


def test_on_a_terminal_the_table_redraws_itself() -> None:
    """The last state is on the screen when the view closes, and names are never read as markup."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    strange = msgspec.structs.replace(ROW, policy="[red]odd[/red]", share={"[bold]m": 1.0})
    with LiveView(console) as view:
        view.update(msgspec.structs.replace(STATE, current=strange, models=("[bold]m",)))
    assert isinstance(console.file, io.StringIO)
    assert "[red]odd[/red]" in console.file.getvalue() and "[bold]m" in console.file.getvalue()


def test_before_the_first_program_the_row_is_starting() -> None:
    """A state without a row so far is shown without figures."""
    state = msgspec.structs.replace(STATE, current=None, n_done=0)
    assert plain_line(state) == "loadwise: starting"
    assert "only large" in drawn(render_state(state))
