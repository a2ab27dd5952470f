"""Live engines, and another simulator, judge ours on scripted multi-turn programs in a cache that is too small.

LOADWISE_VLLM_PYTHON and LOADWISE_DYNAMO_PYTHON name the environments (bench/README.md); llama.cpp is the extra `real`.
Times are printed by `python -m bench.judges`; here only what does not depend on the machine's load is claimed.
"""

from collections.abc import Mapping

import pytest

from bench.judges.__main__ import Verdict, hear

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]


def asked(name: str) -> Verdict:
    """What one judge says; skipped where it cannot be had."""
    verdicts, absent = hear([name], is_quick=True, say=lambda text: None)
    if absent:
        pytest.skip(absent[name])
    return verdicts[name]


def share(values: Mapping[str, float], key: str) -> float:
    return values[f"{key}.hit_ratio"]


@pytest.mark.parametrize("name", ["vllm", "dynamo"])
def test_blocks_are_found_as_the_judge_finds_them(name: str) -> None:
    """One at a time every call's hit is equal, while much of what was computed is lost; at once, most are, in order."""
    verdict = asked(name)
    turns, loop = f"{name}.turns", f"{name}.loop"
    assert verdict.ours[f"{turns}.calls_with_equal_hits"] == 1.0
    assert 0.1 < share(verdict.theirs, turns) < 0.6
    assert verdict.ours[f"{loop}.calls_with_equal_hits"] >= 0.75
    assert abs(share(verdict.ours, loop) - share(verdict.theirs, loop)) < 0.06
    assert verdict.ours[f"{loop}.order_agreement"] > 0.9


def test_llamacpp_finds_what_its_slots_hold() -> None:
    """Every call's hit is the one that a model of slots predicts, the choice among equally good slots included."""
    verdict = asked("llamacpp")
    assert verdict.ours["llamacpp.turns.calls_with_equal_hits"] == 1.0
    assert 0.1 < verdict.theirs["llamacpp.turns.hit_ratio"] < 0.9
