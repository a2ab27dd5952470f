"""A machine may be slow: nothing is given up for it. Tests that want a limit reached set a short one themselves."""

import pytest
from sites import UNTIL_S

LIMITS = ("gateway.serve.FIRST_LOOK_S", "gateway.probe.TIMEOUT_S", "gateway.turns.EMBEDDING_MAX_S")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for whatever is on its way."""
    for name in LIMITS:
        monkeypatch.setattr(f"loadwise.{name}", UNTIL_S)
