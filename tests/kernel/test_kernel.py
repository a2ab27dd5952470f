"""The vocabulary: what facts refuse, what the stack guards, what chance depends on."""

import math

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from loadwise.kernel import events as e
from loadwise.kernel.commands import Command
from loadwise.kernel.errors import ConfigError, Error, LawBroken, Overloaded, Unprocessable
from loadwise.kernel.pool import DEFAULT_SLOTS, BackendSpec, CapacityUnit, ModelSpec, Price, Signal, price_usd
from loadwise.kernel.stack import Stack
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import Verdict, VerdictKind


class Echo:
    """A machine that remembers what it heard."""

    def __init__(self):
        self.heard, self.n_checks = [], 0

    def handle(self, event):
        self.heard.append(event.timer)
        return []

    def check(self):
        self.n_checks += 1

    def dump(self):
        return msgspec.msgpack.encode(self.heard)

    def load(self, state):
        self.heard = msgspec.msgpack.decode(state)


def stack():
    """Two echoes; the second hears timers."""
    return Stack({"deaf": Echo(), "hears": Echo()}, {e.TimerFired: "hears"})


def fired(at_s, timer="t"):
    """A timer event."""
    return e.TimerFired(at_s=at_s, timer=timer)


@pytest.mark.parametrize("at_s", [4.999, -1.0, math.nan, math.inf])
def test_l3_time_never_falls(at_s):
    """An earlier event is the host's bug, and so is one at no time at all; equal times are fine."""
    made = stack()
    made.handle(fired(5.0))
    made.handle(fired(5.0))
    with pytest.raises(LawBroken, match="L3"):
        made.handle(fired(at_s))
    assert made.n_events == 2 and made.now_s == 5.0


def test_stack_hands_each_event_to_its_listener_and_checks_all():
    """One listener an event; `check` reaches every machine."""
    made = stack()
    made.handle(fired(1.0, "x"))
    made.check()
    assert made.machine_by_name["hears"].heard == ["x"] and made.machine_by_name["deaf"].heard == []
    assert [machine.n_checks for machine in made.machine_by_name.values()] == [1, 1]


def test_stack_continues_from_its_dump():
    """Time, count and machines."""
    made, other = stack(), stack()
    made.handle(fired(3.0, "x"))
    other.load(made.dump())
    assert (other.now_s, other.n_events) == (3.0, 1) and other.machine_by_name["hears"].heard == ["x"]
    with pytest.raises(LawBroken, match="L3"):
        other.handle(fired(2.0))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seed=st.integers(-(2**70), 2**70), index=st.integers(-(2**80), 2**80))
def test_draws_depend_on_seed_name_and_index_alone(seed, index):
    """In whatever order they are made, and whatever else was drawn; any integers will do."""
    first, second = Streams(seed), Streams(seed)
    draws = first.at("a", index).random(3).tolist()
    second.at("b", index).random(100)
    second.at("a", index + 1).random(100)
    assert second.at("a", index).random(3).tolist() == draws
    assert first.at("a", index + 1).random(3).tolist() != draws
    assert first.at("b", index).random(3).tolist() != draws


def test_draws_of_neighbouring_indices_do_not_overlap():
    """An index may use 2**32 blocks before it meets the next."""
    streams = Streams(1)
    some = streams.at("a", 5).random(4000)
    assert not np.isin(streams.at("a", 6).random(4000), some).any()


@pytest.mark.parametrize("score", [-0.1, 1.1, math.nan, math.inf])
def test_score_outside_its_range_is_unprocessable(score):
    """422, also when decoded from a journal or a body."""
    with pytest.raises(Unprocessable, match="outside"):
        Verdict(verdict=VerdictKind.PASS, score=score)
    assert Unprocessable.status == 422


@pytest.mark.parametrize(
    ("verdict", "score", "success"),
    [("pass", None, 1.0), ("fail", None, 0.0), ("pass", 0.3, 0.3), ("fail", 0.0, 0.0), ("abstain", None, None)],
)
def test_success_of_a_verdict(verdict, score, success):
    """Abstaining is not zero."""
    assert Verdict(verdict=VerdictKind(verdict), score=score).success == success


def test_abstaining_carries_no_credit_even_with_a_score():
    """The word counts."""
    assert Verdict(verdict=VerdictKind.ABSTAIN, score=0.5).success is None


@pytest.mark.parametrize("field", ["input", "output", "cached_input"])
@pytest.mark.parametrize("value", [-0.01, math.nan, math.inf])
def test_impossible_price_is_a_config_error(field, value):
    """It names field, value and limit."""
    with pytest.raises(ConfigError, match=rf"usd_per_million\.{field} is .*must be a finite number >= 0"):
        Price(**{field: value})


def test_price_of_a_call():
    """Cached tokens at their own price, or at the input price; never more cached than there were."""
    assert price_usd(Price(input=1.0, output=2.0), 1_000_000, 500_000, 999) == 2.0
    assert price_usd(Price(input=1.0, cached_input=0.0), 100, 0, 1000) == 0.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "1 to 64 characters"),
        ({"name": "x" * 65}, "1 to 64 characters"),
        ({"kv_tokens": 1, "slots": 1}, "kv_tokens and slots"),
        ({"slots": 0}, "slots is 0"),
        ({"kv_tokens": -5}, "kv_tokens is -5"),
        ({"requests_per_minute": 0}, "requests_per_minute is 0"),
        ({"connect_timeout_s": 0.0}, "connect_timeout_s is 0.0"),
        ({"first_byte_timeout_s": math.nan}, "first_byte_timeout_s is nan"),
        ({"idle_timeout_s": math.inf}, "idle_timeout_s is inf"),
    ],
)
def test_impossible_backend_is_a_config_error(fields, said):
    """It names the backend's field and value."""
    with pytest.raises(ConfigError, match=said):
        BackendSpec(**{"name": "a", "model": "m", **fields})


def test_capacity_of_a_backend():
    """Its declared unit, or the default number of slots."""
    assert BackendSpec(name="a", model="m").capacity == (CapacityUnit.SLOTS, DEFAULT_SLOTS)
    assert BackendSpec(name="a", model="m", kv_tokens=9).capacity == (CapacityUnit.KV_TOKENS, 9)
    assert BackendSpec(name="a", model="m", requests_per_minute=7).capacity == (CapacityUnit.REQUESTS_PER_MINUTE, 7)
    with pytest.raises(ConfigError, match="context_tokens is 0"):
        ModelSpec(context_tokens=0)


def test_l10_signal_older_than_its_limit_is_unknown():
    """None, not zero; exactly at the limit it still counts."""
    signal = Signal(value=3.0, observed_at_s=10.0)
    assert (signal.fresh(15.0, 5.0), signal.fresh(15.001, 5.0)) == (3.0, None)


def test_every_event_and_command_survives_the_journal():
    """All of the unions encode and decode by tag; an unknown field is refused."""
    for union in (e.Event, Command):
        decode = msgspec.json.Decoder(union).decode
        for kind in union.__args__:
            assert kind.__struct_config__.tag == kind.__name__ and kind.__struct_config__.frozen
            with pytest.raises(msgspec.ValidationError):
                decode(msgspec.json.encode({"type": kind.__name__, "no such field": 1}))
    event = e.TurnArrived(at_s=1.0, turn_id=1, program_id="p", components=(0.5,))
    assert msgspec.json.decode(msgspec.json.encode(event), type=e.Event) == event


def test_errors_carry_what_http_needs():
    """Status and stable code; every class of the tree has both."""
    assert Overloaded("full", retry_after_s=2.0).retry_after_s == 2.0 and Overloaded.status == 503
    assert Error("x", code="special", param="p").code == "special"
    assert str(LawBroken("L4", "story")) == "L4 broken: story"
    pending = [Error]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        assert 400 <= kind.status <= 599 and kind.code.replace("_", "").isalpha(), kind
