"""Dead reckoning: what a reading means between two polls, and that decisions made in between do not herd."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given
from router_host import Host, backend, find, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.policy.registry import PolicySpec
from loadwise.router.load import HISTORY_MAX, OwnLoad


def observe(host: Host, backend_id: str, observed_at_s: float | None = None, **values: float) -> None:
    """A reading arrives."""
    at_s = host.now_s if observed_at_s is None else observed_at_s
    host.send(e.SignalsObserved(at_s=host.now_s, backend_id=backend_id, values=values, observed_at_s=at_s))


def two_replicas() -> Host:
    """One model on two backends with room for everybody; the less loaded takes a program."""
    host = Host(make_stack(backend("a", slots=100), backend("b", slots=100)))
    host.now_s = 10.0
    return host


def test_decisions_between_two_polls_do_not_herd() -> None:
    """Law of dead reckoning: 12 programs after readings of 6 and 0 calls end up so that both backends have as many."""
    host = two_replicas()
    observe(host, "a", n_running=4.0, n_waiting=2.0)
    observe(host, "b", n_running=0.0, n_waiting=0.0)
    chosen = Counter(find(host.arrive(f"p{n}"), c.Dispatch).backend_id for n in range(12))
    assert chosen == {"a": 3, "b": 9}


def test_our_own_calls_are_not_taken_for_others() -> None:
    """A reading that shows what we sent adds nothing, even if it is late and we have got much back since."""
    host = two_replicas()
    for n in range(8):
        host.arrive(f"p{n}")
    host.after(1.0)
    read_at_s = host.now_s
    for turn_id in range(1, 9):
        host.end_attempt(turn_id)
    host.after(0.3)
    observe(host, "a", read_at_s, n_running=4.0)
    assert host.router.backends.n_others("a", host.now_s, 5.0) == 0.0


def test_a_stale_reading_is_unknown_not_zero() -> None:
    """Beyond the age limit the backend counts with our own calls only, and its KV usage is unknown (law L10)."""
    host = two_replicas()
    observe(host, "a", n_running=50.0, kv_usage_ratio=0.5)
    backends = host.router.backends
    assert backends.n_others("a", host.now_s, 5.0) == 50.0
    assert backends.n_others("a", host.now_s + 5.1, 5.0) == 0.0
    assert backends.kv_usage_ratio("a", host.now_s, 5.0) == 0.5
    assert backends.kv_usage_ratio("a", host.now_s + 5.1, 5.0) is None
    assert backends.kv_usage_ratio("b", host.now_s, 5.0) is None


def test_kv_usage_follows_what_we_send() -> None:
    """Between polls the usage rises by the contexts sent, over the declared capacity."""
    host = Host(make_stack(backend("a", kv_tokens=100_000)))
    host.now_s = 10.0
    observe(host, "a", kv_usage_ratio=0.25)
    host.arrive("p", prompt_tokens=20_000)
    assert host.router.backends.kv_usage_ratio("a", host.now_s, 5.0) == pytest.approx(0.45)
    host.end_attempt(1)
    assert host.router.backends.kv_usage_ratio("a", host.now_s, 5.0) == pytest.approx(0.25)


def test_models_are_chosen_by_what_is_there_now() -> None:
    """The load-reading policy sees others' calls at a model's backends too."""
    host = Host(make_stack(backend("a"), backend("b", "large"), policy=PolicySpec(name="least_loaded")))
    host.now_s = 10.0
    observe(host, "a", n_running=3.0)
    assert [find(host.arrive(f"p{n}"), c.Dispatch).model for n in range(4)] == ["large"] * 3 + ["small"]


steps = st.lists(st.tuples(st.floats(0.0, 2.0), st.sampled_from(["send", "end", "read"])), max_size=200)


@given(steps=steps, n_others=st.integers(0, 20))
def test_what_stands_still_is_found_whatever_we_do(steps: list[tuple[float, str]], n_others: int) -> None:
    """However ours come and go, others' calls are never over-counted; after a moment's rest the count is exact."""
    load, now_s, own, changed_at_s = OwnLoad(), 0.0, 0, -10.0
    for seconds, what in steps:
        now_s += seconds
        if what == "send" or (what == "end" and own):
            own += 1 if what == "send" else -1
            load.change(now_s, 1 if what == "send" else -1, 0)
            changed_at_s = now_s
        elif what == "read":
            reading, is_at_rest = float(own + n_others), now_s - changed_at_s > 0.5
            load.read(now_s, {"n_running": reading})
            assert load.n_others is not None and load.n_others <= n_others
            assert not is_at_rest or load.n_others == n_others
        assert len(load.history) <= HISTORY_MAX + 1
