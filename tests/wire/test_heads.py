"""Header blocks, the coarse clock, status lines, error bodies."""

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadwise.wire.client import Upstream
from loadwise.wire.heads import HOP_BY_HOP, StatusLines, Ticker, error_body, header_block

_TOKEN = st.text(alphabet="abcXYZ019-_.!#$%&'*+^`|~", min_size=1, max_size=12)
_VALUE = st.text(alphabet=st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=40)


@given(st.lists(st.tuples(_TOKEN, _VALUE), max_size=6))
def test_header_block_keeps_every_pair(pairs: list[tuple[str, str]]) -> None:
    """Each pair becomes one line, in order."""
    lines = header_block(pairs).split(b"\r\n")
    assert lines.pop() == b""
    assert lines == [f"{name}: {value}".encode("latin-1") for name, value in pairs]


@given(st.text(max_size=20), st.text(max_size=20))
def test_header_block_cannot_be_made_to_forge_a_line(name: str, value: str) -> None:
    """Whatever text is given, the result is one line or a refusal."""
    try:
        block = header_block([(name, value)])
    except ValueError:
        return
    assert block.count(b"\r") == block.count(b"\n") == 1 and block.endswith(b"\r\n") and b"\x00" not in block


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", "x"),
        ("a b", "x"),
        ("a:", "x"),
        ("é", "x"),
        ("a", "x\r\nb: c"),
        ("a", "x\ny"),
        ("a", "\x00"),
        ("a", "€"),
    ],
)
def test_header_block_names_what_it_refuses(name: str, value: str) -> None:
    """A bad name or value raises and the message shows it."""
    with pytest.raises(ValueError) as caught:
        header_block([(name, value)])
    assert repr(value) in str(caught.value) or repr(name) in str(caught.value)


def test_hop_by_hop_names_are_lower_case() -> None:
    """The set can be asked with the names of an exchange."""
    assert all(name == name.lower() for name in HOP_BY_HOP) and b"transfer-encoding" in HOP_BY_HOP


def test_ticker_tells_every_watcher_once_a_tick_and_none_that_left() -> None:
    """A watcher that forgets another in mid-tick does not disturb the sweep."""
    ticker = Ticker()
    heard: list[tuple[str, float]] = []

    def first(now_s: float) -> None:
        heard.append(("first", now_s))
        ticker.forget(second)

    def second(now_s: float) -> None:
        heard.append(("second", now_s))

    ticker.watch(first)
    ticker.watch(second)
    ticker.watch(second)
    ticker.tick(1.0)
    ticker.tick(2.0)
    assert heard == [("first", 1.0), ("second", 1.0), ("first", 2.0)]
    assert ticker.now_s == 2.0


class Wait(NamedTuple):
    """A deadline that somebody set."""

    began_s: float
    limit_s: float
    deadline_s: float


class StalledLoop:
    """A loop whose clock a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def cancel(self) -> None:
        """The loop is its timers' handle, too."""
        self.due = None

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> "StalledLoop":
        self.due = (self.now_s + delay_s, call)
        return self

    def run(self, late_s: float = 0.0) -> None:
        """What is due is called, so much later."""
        assert self.due is not None
        at_s, call = self.due
        self.now_s, self.due = at_s + late_s, None
        call()


_LATE_S = st.just(0.0) | st.floats(0.0, 1.0) | st.floats(1.0, 90.0)


@given(
    st.lists(st.tuples(_LATE_S, st.floats(0.0, 1.0), st.floats(0.0, 8.0)), min_size=1, max_size=30),
    st.sampled_from([0.05, 0.5, 2.0]),
)
@example([(60.0, 1.0, 0.5), (60.0, 0.0, 8.0)], 0.5)
def test_nobodys_time_is_up_before_its_limit_or_for_a_standstill(
    steps: list[tuple[float, float, float]], period_s: float
) -> None:
    """Whatever ticks are late, and whenever a deadline is set: its limit had passed by the tick before the one that
    finds it over, and while ticks come in time it is five periods late at most."""
    loop, ticker = StalledLoop(), Ticker(period_s)
    waits: list[Wait] = []
    ticks_s = [loop.now_s]

    def sweep(now_s: float) -> None:
        ticks_s.append(loop.now_s)
        for wait in [wait for wait in waits if now_s >= wait.deadline_s]:
            waits.remove(wait)
            assert ticks_s[-2] - wait.began_s >= wait.limit_s - 1e-6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadwise.wire.heads.asyncio.get_running_loop", lambda: loop)
        ticker.start()
        ticker.watch(sweep)
    for late_s, share, limit_s in steps:
        waits.append(Wait(loop.now_s + share * (period_s + late_s), limit_s, ticker.after(limit_s)))
        loop.run(late_s)
    latest_s = loop.now_s + max((wait.limit_s for wait in waits), default=0.0) + 5 * period_s
    while waits:
        loop.run()
    assert loop.now_s <= latest_s + 1e-6


def test_the_clock_keeps_the_loops_pace_and_leaves_standstills_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks late by up to a period are made up for, a minute is not; stopped and started again it goes on."""
    loop, ticker = StalledLoop(), Ticker(period_s=0.5)
    monkeypatch.setattr("loadwise.wire.heads.asyncio.get_running_loop", lambda: loop)
    heard: list[float] = []
    ticker.watch(heard.append)
    ticker.start()
    for late_s in (0.0, 0.4, 60.0, 0.0):
        loop.run(late_s)
    assert heard == pytest.approx([0.0, 0.5, 1.4, 2.4, 2.9])
    ticker.stop()
    loop.now_s += 60.0
    ticker.start()
    assert ticker.now_s == pytest.approx(2.9) and Upstream("http://127.0.0.1:9", ticker=ticker).after(5.0) > 7.9


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan"), float("inf")])
def test_ticker_refuses_a_period_that_is_none(period_s: float) -> None:
    """A sweep without pause or without end is an error at once."""
    with pytest.raises(ValueError, match="period_s"):
        Ticker(period_s)


def test_status_lines_carry_the_date_of_their_second() -> None:
    """The cached line is renewed when the second changes, and only then."""
    lines = StatusLines()
    lines.renew(0.0)
    line = lines[200]
    assert line == b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    lines.renew(0.9)
    assert lines[200] is line
    lines.renew(1.0)
    assert lines[200] == line.replace(b"00:00:00", b"00:00:01")


def test_status_lines_know_no_reason_for_odd_codes_but_write_them() -> None:
    """An engine's own status passes through."""
    assert StatusLines()[529].startswith(b"HTTP/1.1 529 ")


@given(st.text(), st.text(), st.text(), st.none() | st.text())
def test_error_body_has_the_four_fields_clients_read(message: str, kind: str, code: str, param: str | None) -> None:
    """Every error is the OpenAI shape, whatever the texts hold."""
    error = json.loads(error_body(message, kind, code, param))["error"]
    assert error == {"message": message, "type": kind, "param": param, "code": code}
