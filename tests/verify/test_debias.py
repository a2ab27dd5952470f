"""Known error rates out of the reward: unbiased, unclipped, refused where little is left; and rates from an audit."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.verify.debias import ErrorRates, estimate_rates

rates = st.tuples(st.floats(0, 0.79), st.floats(0, 0.79)).filter(lambda pair: sum(pair) < 0.79)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rates, st.floats(0, 1))
def test_the_debiased_reward_is_unbiased(pair: tuple[float, float], truth: float) -> None:
    """The mean over what the verifier says is the true success."""
    e0, e1 = pair
    known = ErrorRates(false_pass_ratio=e0, false_fail_ratio=e1)
    says_pass = truth * (1 - e1) + (1 - truth) * e0
    mean = says_pass * known.debiased(1.0) + (1 - says_pass) * known.debiased(0.0)
    assert mean == pytest.approx(truth, abs=1e-9)


def test_it_is_not_clipped() -> None:
    """A pass is worth more than 1 and a fail less than 0: clipping would bring the bias back."""
    known = ErrorRates(false_pass_ratio=0.2, false_fail_ratio=0.3)
    assert known.debiased(1.0) == pytest.approx(1.6) and known.debiased(0.0) == pytest.approx(-0.4)
    assert ErrorRates().debiased(0.25) == 0.25


@pytest.mark.parametrize(
    ("e0", "e1", "says"),
    [(0.5, 0.3, "must be < 0.8"), (0.4, 0.6, "must be < 0.8"), (-0.1, 0, "in \\[0, 1\\]"), (math.nan, 0, "nan")],
)
def test_rates_that_leave_too_little_are_refused(e0: float, e1: float, says: str) -> None:
    """From 0.8 on, the verdicts say too little."""
    with pytest.raises(ConfigError, match=says):
        ErrorRates(false_pass_ratio=e0, false_fail_ratio=e1)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_an_audit_gives_rates_within_their_intervals(a: int, b: int, c: int, d: int) -> None:
    """The interval holds the rate, stays in [0, 1] and is whole where nothing is known."""
    found = estimate_rates(min(a, b), b, min(c, d), d)
    for rate, n in ((found.false_pass, b), (found.false_fail, d)):
        assert 0 <= rate.low <= rate.high <= 1 and rate.n == n
        if n:
            assert rate.low <= rate.ratio <= rate.high
        else:
            assert math.isnan(rate.ratio) and (rate.low, rate.high) == (0, 1)


def test_more_audited_cases_narrow_the_interval() -> None:
    """Known values of Wilson's interval."""
    few, many = estimate_rates(1, 10, 0, 10), estimate_rates(100, 1000, 0, 1000)
    assert (few.false_pass.low, few.false_pass.high) == pytest.approx((0.0179, 0.4042), abs=1e-3)
    assert many.false_pass.high - many.false_pass.low < 0.04
    assert few.false_fail.low == 0 and few.false_fail.high == pytest.approx(0.2775, abs=1e-3)
    with pytest.raises(ConfigError, match="passed_wrong is 3; it must be in \\[0, 2\\]"):
        estimate_rates(3, 2, 0, 0)
