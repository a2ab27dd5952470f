"""The router's small parts on their own: agenda, order, transitions, configuration."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.work import ProgramState
from loadwise.router.agenda import Agenda
from loadwise.router.config import FeedbackConfig, RouterConfig, SelectorConfig, TradeConfig
from loadwise.router.order import FifoOrder
from loadwise.router.program import Program

KEYS = st.sampled_from("abcd")


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.floats(0.0, 100.0))), max_size=60), st.floats(0.0, 100.0))
def test_agenda_agrees_with_a_plain_dict(steps, now_s):
    """Scheduling moves a key, cancelling drops it; what is due comes in order of time, then of scheduling."""
    agenda, model = Agenda(), {}
    for serial, (key, due_at_s) in enumerate(steps):
        if due_at_s is None:
            agenda.cancel(key)
            model.pop(key, None)
        else:
            agenda.schedule(key, due_at_s)
            model[key] = (due_at_s, serial)
    expected = sorted(model, key=model.__getitem__)
    assert len(agenda) == len(model) and all((key in agenda) == (key in model) for key in "abcd")
    assert agenda.next_at_s == (model[expected[0]][0] if expected else None)
    copy = Agenda()
    copy.load(agenda.dump())
    due = [key for key in expected if model[key][0] <= now_s]
    assert agenda.pop_due(now_s) == due == copy.pop_due(now_s)
    assert [key for key, _ in agenda.dump()] == expected[len(due) :]


def test_agenda_forgets_the_dead():
    """A key moved a million times leaves no million entries (law L15)."""
    agenda = Agenda()
    for n in range(10_000):
        agenda.schedule("a", float(n))
    assert len(agenda._heap) <= 2 * len(agenda) + 65


@pytest.mark.parametrize("due_at_s", [math.nan, math.inf])
def test_agenda_refuses_an_instant_that_never_comes(due_at_s):
    """A NaN at the heap's top would keep everything behind it from being due."""
    with pytest.raises(LawBroken, match="L15"):
        Agenda().schedule("a", due_at_s)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_order_agrees_with_a_plain_list(steps):
    """First in, first out, with removal from anywhere."""
    order, model = FifoOrder(), []
    for is_push, turn_id in steps:
        if is_push and turn_id not in model:
            order.push(turn_id)
            model.append(turn_id)
        elif not is_push:
            order.remove(turn_id)
            if turn_id in model:
                model.remove(turn_id)
    assert list(order) == model and len(order) == len(model)
    assert order.head() == (model[0] if model else None)
    assert all((turn_id in order) == (turn_id in model) for turn_id in range(10))


def test_move_that_the_table_lacks_is_a_bug():
    """It names the program and both states."""
    program = Program(program_id="p", arrived_at_s=0.0, active_at_s=0.0)
    with pytest.raises(LawBroken, match="'p' cannot go from arrived to closed"):
        program.move(ProgramState.CLOSED)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (RouterConfig, {"hold_max_s": 0.0}, "router.hold_max_s is 0.0"),
        (RouterConfig, {"hold_max_s": math.nan}, "router.hold_max_s is nan"),
        (RouterConfig, {"idle_s": math.inf}, "router.idle_s is inf"),
        (RouterConfig, {"budget_s": -1.0}, "router.budget_s is -1.0"),
        (RouterConfig, {"admission_ratio": 0.0}, "router.admission_ratio is 0.0"),
        (RouterConfig, {"admission_ratio": 1.1}, "router.admission_ratio is 1.1"),
        (RouterConfig, {"admission_ratio": math.nan}, "router.admission_ratio is nan"),
        (RouterConfig, {"held_max": 0}, "router.held_max is 0"),
        (RouterConfig, {"turns_max": 0}, "router.turns_max is 0"),
        (RouterConfig, {"closed_max": -1}, "router.closed_max is -1"),
        (FeedbackConfig, {"size": 0}, "router.feedback.size is 0"),
        (FeedbackConfig, {"size": 4097}, "router.feedback.size is 4097"),
        (SelectorConfig, {"url": "ftp://x"}, "router.selector.url is 'ftp://x'"),
        (SelectorConfig, {"url": "http://x", "timeout_s": 0.0}, "router.selector.timeout_s is 0.0"),
        (TradeConfig, {"seconds_per_point": 0.0}, "router.seconds_per_point is 0.0"),
        (TradeConfig, {"wait_reference_s": math.nan}, "router.wait_reference_s is nan"),
        (TradeConfig, {"beta": 1.5}, "router.beta is 1.5"),
        (TradeConfig, {"beta": math.nan}, "router.beta is nan"),
        (TradeConfig, {"backpressure": -1.0}, "router.backpressure is -1.0"),
        (TradeConfig, {"multiplier": math.inf}, "router.multiplier is inf"),
    ],
)
def test_configuration_out_of_range_names_value_and_limit(kind, fields, said):
    """For library callers as for files."""
    with pytest.raises(ConfigError) as raised:
        kind(**fields)
    assert said in str(raised.value) and "must" in str(raised.value)
