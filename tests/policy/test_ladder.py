"""The ladder climbs where another attempt pays, reads noisy verdicts as what they are, guards against unknown rates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError, SchemaMismatch
from loadwise.policy.ladder import AUDIT_PRIOR, Ladder, LadderOptions
from loadwise.policy.reward import RewardSpec

X = np.array([1.0])
FREE = RewardSpec()


def taught(
    first: float,
    after: float,
    false_pass: float,
    false_fail: float,
    *,
    n: int = 4000,
    knows: bool = True,
    **options: float,
) -> Ladder:
    """A ladder after n attempts of each kind, seen through the verifier; true rates of success are given."""
    rates = {"false_pass": false_pass, "false_fail": false_fail} if knows else {}
    ladder = Ladder(LadderOptions(n_features=1, optimism=0.0, **rates, **options), FREE)
    seen = [s * (1.0 - false_fail) + (1.0 - s) * false_pass for s in (first, after)]
    for _ in range(n):
        ladder.learn(X, None, "small", success=seen[0], cost_usd=0.1)
        ladder.learn(X, "small", "large", success=seen[1], cost_usd=0.1)
    return ladder


@pytest.mark.parametrize("false_pass", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("false_fail", [0.0, 0.1, 0.3])
@pytest.mark.parametrize(("first", "after"), [(0.6, 0.3), (0.9, 0.2), (0.5, 0.6), (0.9, 0.7)])
def test_it_climbs_exactly_where_the_truth_pays(
    false_pass: float, false_fail: float, first: float, after: float
) -> None:
    """With the rates known: go is the second attempt's success, stop the share of failed programs that were right."""
    ladder = taught(first, after, false_pass, false_fail)
    failed = first * false_fail + (1.0 - first) * (1.0 - false_pass)
    stop = first * false_fail / failed
    rungs = ladder.climb(X, "small", ["large"])
    assert bool(rungs) is (after > stop)
    if rungs:
        assert rungs[0].go == pytest.approx(after, abs=1e-3)
        assert rungs[0].stop == pytest.approx(stop, abs=5e-3)


def test_unknown_rates_never_climb_where_some_allowed_rates_forbid_it() -> None:
    """Whatever the true rates up to .3 are, it climbs only where the truth pays."""
    rates = (0.0, 0.15, 0.3)
    n_climbed = 0
    for false_pass, false_fail in itertools.product(rates, rates):
        for first, after in itertools.product((0.3, 0.6, 0.9), (0.1, 0.4, 0.7)):
            ladder = taught(first, after, false_pass, false_fail, n=400, knows=False)
            stop = first * false_fail / (first * false_fail + (1.0 - first) * (1.0 - false_pass))
            if ladder.climb(X, "small", ["large"]):
                n_climbed += 1
                assert after > stop - 0.01, (false_pass, false_fail, first, after)
    assert n_climbed > 20


def test_rates_told_with_the_verdict_go_before_its_own() -> None:
    """A task type's verifier may be known where others are not."""
    ladder = taught(0.9, 0.35, 0.0, 0.3, n=400, knows=False)
    assert not ladder.climb(X, "small", ["large"])
    assert ladder.climb(X, "small", ["large"], rates=(0.0, 0.0))


def test_cost_is_weighed_as_in_the_reward() -> None:
    """An attempt must bring more than it costs; where two pay, the better one comes first."""
    reward = RewardSpec(cost_weight=1.0, scale_usd=1.0, clip="none")
    ladder = Ladder(LadderOptions(n_features=1, optimism=0.0, false_pass=0.0, false_fail=0.0), reward)
    for _ in range(200):
        ladder.learn(X, None, "small", success=0.0, cost_usd=0.01)
        for name, success, cost in (("cheap", 0.4, 0.1), ("good", 0.9, 0.3), ("dear", 0.9, 1.5)):
            ladder.learn(X, "small", name, success=success, cost_usd=cost)
    assert [rung.candidate for rung in ladder.climb(X, "small", ["cheap", "dear", "good"])] == ["good", "cheap"]


def test_what_is_new_is_tried_and_left_when_it_brings_nothing() -> None:
    """Optimism ends with evidence."""
    ladder = Ladder(LadderOptions(n_features=1, false_pass=0.05, false_fail=0.2, optimism=1.0), FREE)
    for _ in range(10):
        ladder.learn(X, None, "small", success=0.7, cost_usd=0.1)
    n_tried = 0
    while ladder.climb(X, "small", ["large"]):
        ladder.learn(X, "small", "large", success=0.05, cost_usd=0.1)
        n_tried += 1
        assert n_tried < 100
    assert n_tried >= 1


def test_audits_find_the_rates() -> None:
    """Once enough of the truth is known, unknown rates are no longer unknown."""
    rng = np.random.default_rng(0)
    ladder = Ladder(LadderOptions(), FREE)
    assert ladder.rates is None
    for _ in range(2000):
        is_right = bool(rng.random() < 0.5)
        wrong = rng.random() < (0.05 if is_right else 0.2)
        ladder.audited(passed=is_right != wrong, is_right=is_right)
    assert ladder.rates is not None and AUDIT_PRIOR < 1000
    assert ladder.rates == pytest.approx((0.2, 0.05), abs=0.03)


def test_a_dump_continues_alike_and_refuses_another_configuration() -> None:
    """Byte for byte, audits included."""
    ladder = taught(0.6, 0.3, 0.1, 0.1, n=50)
    ladder.audited(passed=True, is_right=False)
    options = LadderOptions(n_features=1, optimism=0.0, false_pass=0.1, false_fail=0.1)
    twin = Ladder(options, FREE)
    twin.load(ladder.dump())
    assert twin.dump() == ladder.dump()
    assert twin.climb(X, "small", ["large"]) == ladder.climb(X, "small", ["large"])
    other = Ladder(LadderOptions(n_features=1, optimism=0.5), FREE)
    for state in (ladder.dump(), b"", b"\xc0"):
        with pytest.raises(SchemaMismatch):
            other.load(state)


@pytest.mark.parametrize("said", [{"false_pass": 0.1}, {"false_pass": 0.5, "false_fail": 0.1}, {"optimism": -1.0}])
def test_wrong_options_are_refused(said: dict[str, float]) -> None:
    """The message names the option."""
    with pytest.raises(ConfigError):
        LadderOptions(**said)
