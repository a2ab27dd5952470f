"""Agreement of several verifiers: the rules, abstentions, bounds, and state that survives a restart."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.check import Finding, RunCommand
from loadwise.verify.registry import make_verifier
from loadwise.verify.spec import VerifierSpec
from loadwise.verify.verifier import Verifier, Wanted

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN
EXIT_CODE = {PASS: 0, FAIL: 1, ABSTAIN: 2}
kinds = st.sampled_from([PASS, FAIL, ABSTAIN])


def fusion(rule: str, n: int, weights: list[float] | None = None, **options: Any) -> Verifier:
    """A fusion of `n` commands."""
    members = [{"kind": "command", "run": f"member {number}"} for number in range(n)]
    for member, weight in zip(members, weights or [], strict=False):
        member["weight"] = weight  # type: ignore[assignment]
    return make_verifier(VerifierSpec(kind="fusion", options={"rule": rule, "members": members, **options}))


def fused(by: Verifier, votes: list[VerdictKind]) -> tuple[Verdict, int]:
    """The verdict where the members vote so, and how many were asked. The state goes through JSON at each step."""
    step = by.begin(Case())
    for asked in itertools.count():
        if isinstance(step, Verdict):
            return step, asked
        assert isinstance(step.check, RunCommand)
        vote = votes[int(step.check.argv[1])]
        step = msgspec.json.decode(msgspec.json.encode(step), type=Wanted)
        step = by.resume(Case(), step.state, Finding(exit_code=EXIT_CODE[vote]))
    raise AssertionError


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(kinds, min_size=2, max_size=5))
def test_all_and_any_follow_logic(votes: list[VerdictKind]) -> None:
    """Kleene's: a fail settles `all`, a pass settles `any`, an abstention that could matter abstains."""
    expected_all = FAIL if FAIL in votes else ABSTAIN if ABSTAIN in votes else PASS
    expected_any = PASS if PASS in votes else ABSTAIN if ABSTAIN in votes else FAIL
    assert fused(fusion("all", len(votes)), votes)[0].verdict is expected_all
    assert fused(fusion("any", len(votes)), votes)[0].verdict is expected_any


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(kinds, min_size=2, max_size=5))
def test_ignored_abstentions_are_as_if_not_there(votes: list[VerdictKind]) -> None:
    """The rest decides, where there is a rest."""
    rest = [vote for vote in votes if vote is not ABSTAIN]
    for rule, settles, else_ in (("all", FAIL, PASS), ("any", PASS, FAIL)):
        expected = ABSTAIN if not rest else settles if settles in rest else else_
        assert fused(fusion(rule, len(votes), abstentions="ignore"), votes)[0].verdict is expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(kinds, min_size=2, max_size=5))
def test_first_decides_and_asks_no_further(votes: list[VerdictKind]) -> None:
    """A dear judge at the end is asked only where the cheap ones do not know."""
    found, asked = fused(fusion("first", len(votes)), votes)
    decisive = [number for number, vote in enumerate(votes) if vote is not ABSTAIN]
    assert found.verdict is (votes[decisive[0]] if decisive else ABSTAIN)
    assert asked == (decisive[0] + 1 if decisive else len(votes))


def test_settled_rules_ask_no_further() -> None:
    """`all` stops at the first fail, `any` at the first pass."""
    assert fused(fusion("all", 3), [FAIL, PASS, PASS])[1] == 1
    assert fused(fusion("any", 3), [FAIL, PASS, PASS])[1] == 2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(kinds, st.floats(0.1, 10)), min_size=2, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_the_weighted_mean(told: list[tuple[VerdictKind, float]], threshold: float, quorum: float) -> None:
    """Over those that decided, where they are enough."""
    votes, weights = [vote for vote, _ in told], [weight for _, weight in told]
    by = fusion("weighted", len(votes), weights, threshold=threshold, quorum_ratio=quorum)
    found = fused(by, votes)[0]
    decided = [(vote, weight) for vote, weight in told if vote is not ABSTAIN]
    if not decided or sum(weight for _, weight in decided) / sum(weights) < quorum:
        assert found.verdict is ABSTAIN
        return
    mean = sum(weight for vote, weight in decided if vote is PASS) / sum(weight for _, weight in decided)
    assert found.score == pytest.approx(mean)
    assert found.verdict is (PASS if found.score is not None and found.score >= threshold else FAIL)


def test_every_vote_is_in_the_evidence() -> None:
    """Who said what."""
    found = fused(fusion("all", 2), [PASS, ABSTAIN])[0]
    assert list(found.evidence) == ["1 command", "2 command"] and found.evidence["2 command"].startswith("abstain")
    assert found.verifier == "fusion" and found.version == "1:all(command-1,command-1)"


def nested(depth: int) -> dict[str, Any]:
    """Fusions within fusions."""
    inner = {"kind": "exact"} if depth == 0 else {"kind": "fusion", "options": nested(depth - 1)}
    return {"rule": "first", "members": [inner, {"kind": "numeric"}]}


def test_fusions_nest_to_a_bounded_depth() -> None:
    """Three deep they work; deeper they are refused before anything is made."""
    by = make_verifier(VerifierSpec(kind="fusion", options=nested(2)))
    step = by.begin(Case(answer="Paris", references={"reference": "paris"}))
    assert isinstance(step, Verdict) and step.verdict is PASS
    for depth in (3, 100):
        with pytest.raises(ConfigError, match="nested 4 deep; 3 is the limit"):
            make_verifier(VerifierSpec(kind="fusion", options=nested(depth)))
    with pytest.raises(ConfigError):
        make_verifier(VerifierSpec(kind="fusion", options=json.loads(json.dumps(nested(200)))))


def test_an_inner_state_goes_through_the_outer() -> None:
    """A fusion within a fusion asks its members through both."""
    inner = {"rule": "all", "members": [{"kind": "command", "run": "member 0"}, {"kind": "command", "run": "member 1"}]}
    members = [{"kind": "fusion", "options": inner}, {"kind": "command", "run": "member 2"}]
    by = make_verifier(VerifierSpec(kind="fusion", options={"rule": "any", "members": members}))
    assert fused(by, [PASS, FAIL, PASS])[0].verdict is PASS
    assert fused(by, [PASS, FAIL, FAIL])[0].verdict is FAIL
    assert fused(by, [PASS, PASS, FAIL])[1] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "all"}, "members"),
        ({"rule": "most", "members": [{"kind": "exact"}] * 2}, "rule"),
        ({"rule": "all", "members": [{"kind": "exact"}]}, "members has 1 entries; it must have 2 to 8"),
        ({"rule": "all", "members": [{"kind": "exact"}] * 9}, "members has 9 entries"),
        ({"rule": "all", "members": [{"kind": "exact"}, {"kind": "human"}]}, "cannot wait for reports"),
        ({"rule": "all", "members": [{"kind": "exact"}, {"kind": "nonsense"}]}, "unknown"),
        ({"rule": "all", "members": [{"kind": "exact"}, {"kind": "exact", "weight": 0.0}]}, "weight is 0.0"),
        ({"rule": "all", "members": [{"kind": "exact"}, {"kind": "numeric", "options": {"x": 1}}]}, "no option 'x'"),
        ({"rule": "all", "members": [{"kind": "exact"}] * 2, "threshold": 2.0}, "threshold is 2.0"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    """Of the fusion and of its members."""
    with pytest.raises(ConfigError, match=says):
        make_verifier(VerifierSpec(kind="fusion", options=options))
