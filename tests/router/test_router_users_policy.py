"""A user's policy class may do what it likes: the router goes on, says so, and replays alike."""

import pytest
from router_host import Host, backend, encoded, find, make_stack

from loadwise.kernel import commands as c
from loadwise.policy.guarded import Guarded, guarded
from loadwise.policy.linear import LinUCB
from loadwise.policy.registry import PolicySpec


def host(mood=0, path="users:Moody", **router):
    """Two models under a user's policy."""
    policy = PolicySpec(name=path, options={"mood": mood})
    return Host(make_stack(backend("a"), backend("b", "large"), policy=policy, **router))


@pytest.mark.parametrize("mood", range(10))
def test_every_program_gets_a_model(mood):
    """Whatever choose does: the cheapest model, named as a fallback, with a propensity of one."""
    h = host(mood)
    n_fallbacks = 0
    for n in range(20):
        decision = find(h.arrive(f"p{n}"), c.RecordDecision)
        if decision.reason == "policy_fallback":
            n_fallbacks += 1
            assert decision.chosen == "small" and [v.propensity for v in decision.candidates] == [1.0, 0.0]
        assert all(x == x for x in decision.context), "the policy changed the context that is remembered"
        h.end_attempt(h.n_turns)
        h.judge(f"p{n}", "pass") if n % 2 else h.finish(f"p{n}")
    assert n_fallbacks == 16  # of ten ways to choose, two are choices
    assert h.router.counts.policy_errors >= n_fallbacks
    assert "moody" in h.router.desk.policy_failure


def test_estimates_that_are_none_are_left_out():
    """No propensities are recorded rather than wrong ones."""
    h = host(mood=7)  # decision 1 is the choice without propensities
    assert [v.propensity for v in find(h.arrive("p"), c.RecordDecision).candidates] == [None, None]
    h.end_attempt(1)
    assert not [command for command in h.finish("p") if type(command) is c.RecordPropensities]
    assert "propensities failed" in h.router.desk.policy_failure


def test_errors_fall_alike_again():
    """Equal events, equal errors, equal state (laws L6 and L7)."""
    dumps = []
    for _ in range(2):
        h = host(mood=4)
        for n in range(30):
            h.serve(f"p{n}")
            h.judge(f"p{n}", "fail")
        dumps.append((h.stack.dump(), encoded(list(h.decided.values()))))
    assert dumps[0] == dumps[1]


def test_policy_that_cannot_be_dumped_begins_anew():
    """The router's state is whole without it; decisions of the lost learner teach nobody."""
    h = host(path="users:Mute")
    h.serve("p")
    other = host(path="users:Mute")
    other.stack.load(h.stack.dump())
    assert other.router.credit.learners[0].inner.n_seen == 0
    find(other.judge("p"), c.RecordCredit)
    assert other.router.credit.learners[0].inner.n_seen == 0
    assert "no words" in h.router.desk.policy_failure


def test_failing_replica_policy_still_picks_a_replica():
    """Every turn is dispatched."""
    replica = PolicySpec(name="users:Moody")
    h = Host(make_stack(backend("a"), backend("b"), replica_policy=replica))
    for n in range(12):
        find(h.arrive(f"p{n}"), c.Dispatch)
    assert h.router.counts.policy_errors > 5


def test_ours_are_not_fenced_in():
    """The fence costs microseconds that only strangers need."""

    class Stranger(LinUCB):
        pass

    ours = LinUCB()
    assert guarded(ours, lambda text, is_counted: None) is ours
    assert isinstance(guarded(Stranger(), lambda text, is_counted: None), Guarded)
