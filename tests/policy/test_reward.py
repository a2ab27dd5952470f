"""The reward is Eq. 3, and its replay form orders outcomes alike."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, Unprocessable
from loadwise.policy.reward import RewardSpec, replay_weight

unit = st.floats(0.0, 1.0)
alphas = st.floats(0.0, 0.99)
scales = st.floats(1e-6, 1e6)


@given(alphas, scales, st.tuples(unit, unit), st.tuples(unit, unit))
def test_replay_form_preserves_the_order(alpha: float, scale_usd: float, one, other) -> None:
    """With a = α/(1-α), and cost below $0, the two forms agree on which outcome is better (A.2, sentence 1)."""
    paper = RewardSpec(cost_weight=alpha, scale_usd=scale_usd)
    replay = RewardSpec(cost_weight=replay_weight(alpha), scale_usd=scale_usd, clip="none")
    gaps = [
        spec.reward(one[0], one[1] * scale_usd) - spec.reward(other[0], other[1] * scale_usd)
        for spec in (paper, replay)
    ]
    assume(abs(gaps[0]) > 1e-9)
    assert (gaps[0] > 0) == (gaps[1] > 0)
    assert gaps[0] == pytest.approx((1 - alpha) * gaps[1], rel=1e-6, abs=1e-9)


@given(unit, st.floats(0.0, 1e9), scales, unit)
def test_clipped_reward_is_bounded(success: float, cost_usd: float, scale_usd: float, alpha: float) -> None:
    """With the clip no cost takes more than α: the reward stays within [-α, 1-α]."""
    reward = RewardSpec(cost_weight=alpha, scale_usd=scale_usd).reward(success, cost_usd)
    assert -alpha - 1e-12 <= reward <= 1 - alpha + 1e-12


@given(unit, st.floats(0.0, 1e9))
def test_at_weight_zero_the_reward_is_the_success(success: float, cost_usd: float) -> None:
    """α = 0 leaves no trace of cost, clip or not: the live loops learn success."""
    for clip in ("ratio", "none"):
        assert RewardSpec(scale_usd=0.5, clip=clip).reward(success, cost_usd) == success


def test_the_clip_acts_above_the_scale_only() -> None:
    """Twice $0 costs as much as $0 with the clip, and twice as much without."""
    assert RewardSpec(cost_weight=0.5).reward(1.0, 2.0) == RewardSpec(cost_weight=0.5).reward(1.0, 1.0) == 0.0
    assert RewardSpec(cost_weight=0.5, clip="none").reward(1.0, 2.0) == 0.0
    assert RewardSpec(cost_weight=3.0, clip="none").reward(1.0, 2.0) == -5.0


@pytest.mark.parametrize(
    "fields",
    [
        {"cost_weight": 1.01},
        {"cost_weight": -0.1},
        {"cost_weight": float("nan")},
        {"cost_weight": float("inf"), "clip": "none"},
        {"scale_usd": 0.0},
        {"scale_usd": float("nan")},
        {"scale_usd": float("inf")},
        {"clip": "half"},
    ],
)
def test_specifications_out_of_range_are_refused(fields) -> None:
    """The error names the field, the value and the limit."""
    with pytest.raises(ConfigError, match=f"reward {'clip' if 'half' in fields.values() else next(iter(fields))} is"):
        RewardSpec(**fields)


@pytest.mark.parametrize(
    ("success", "cost_usd", "param"),
    [(1.1, 0.0, "success"), (float("nan"), 0.0, "success"), (0.5, -1.0, "cost_usd"), (0.5, float("inf"), "cost_usd")],
)
def test_outcomes_out_of_range_are_refused(success: float, cost_usd: float, param: str) -> None:
    """A NaN or a negative cost never becomes a reward."""
    with pytest.raises(Unprocessable, match=param) as caught:
        RewardSpec().reward(success, cost_usd)
    assert caught.value.param == param


@pytest.mark.parametrize("alpha", [1.0, -0.1, float("nan")])
def test_replay_weight_needs_alpha_below_one(alpha: float) -> None:
    """At α = 1 success counts nothing and no finite a says so."""
    with pytest.raises(ConfigError, match="alpha is"):
        replay_weight(alpha)
