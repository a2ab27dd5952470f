"""No test fails for what a clock says: a busy machine is slow, and being slow is no defect."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_no_property_is_refuted_by_a_slow_example() -> None:
    """Hypothesis fails an example that takes 200 ms, and a strategy that is slow to draw, unless told otherwise."""
    for name in ("same", "search"):
        profile = settings.get_profile(name)
        assert profile.deadline is None
        assert HealthCheck.too_slow in profile.suppress_health_check
    assert settings.default is not None and settings.default.deadline is None
