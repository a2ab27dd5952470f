"""What an engine says it used is believed only where it can be."""

import pytest

from loadwise.gateway.usage import usage_of
from loadwise.kernel.work import Usage


@pytest.mark.parametrize("count", [1e30, 10**30, 16_000_001, float("inf"), float("nan"), 2.5, True, "7", None])
def test_a_prompt_that_cannot_have_been_counted_is_no_usage(count):
    """Then the host's own estimate stands, and says that it is one."""
    assert usage_of({"prompt_tokens": count, "completion_tokens": 1}) is None


@pytest.mark.parametrize("count", [1e30, float("inf"), 2.5, "7"])
def test_an_answer_that_cannot_have_been_counted_is_no_usage(count):
    """The whole is doubted: what counts one thing wrong has counted neither."""
    assert usage_of({"prompt_tokens": 3, "completion_tokens": count}) is None


def test_counts_that_can_be_are_believed():
    """Whole numbers, however they are written; an answer that is not counted is none."""
    assert usage_of({"prompt_tokens": 16_000_000}) == Usage(prompt_tokens=16_000_000)
    assert usage_of({"prompt_tokens": 3.0, "completion_tokens": None}) == Usage(prompt_tokens=3)
