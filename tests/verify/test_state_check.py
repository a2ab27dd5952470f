"""The state check: equal, subset, unordered, tolerances, ignored paths, and JSON that means harm."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadwise.kernel.work import VerdictKind
from loadwise.verify.case import Case
from tests.verify.carry import told, verifier

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def case(found: Any, wanted: Any) -> Case:
    """Two states, as JSON where they are not texts already."""
    written = [value if isinstance(value, str) else json.dumps(value) for value in (found, wanted)]
    return Case(artefacts={"state": written[0]}, references={"expected_state": written[1]})


def verdict(found: Any, wanted: Any, **options: Any) -> VerdictKind:
    """What the state check says."""
    return told(verifier("state", **options), case(found, wanted)).verdict


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_every_state_equals_itself(value: Any) -> None:
    """In every mode."""
    for options in ({}, {"mode": "subset"}, {"unordered": True}):
        assert verdict([value], [value], **options) is PASS


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, values)
def test_equal_means_equal_json(one: Any, two: Any) -> None:
    """Without options the verdict is that of a comparison which knows booleans from numbers."""
    same = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    number = isinstance(one, int | float) and isinstance(two, int | float) and not isinstance(one, bool)
    if not (number or isinstance(one, list | dict)):
        assert (verdict([one], [two]) is PASS) == same


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 5), max_size=8), st.randoms(use_true_random=False))
def test_collections_forget_order_but_not_number(items: list[int], luck: Any) -> None:
    """A shuffle passes; one entry more, less or other fails."""
    shuffled = items[:]
    luck.shuffle(shuffled)
    assert verdict(shuffled, items, unordered=True) is PASS
    assert verdict([*shuffled, 9], items, unordered=True) is FAIL
    assert verdict([*shuffled, 9], items, unordered=True, mode="subset") is PASS
    assert verdict([*items, 1], [*items, 2], unordered=True) is FAIL


def test_matching_with_tolerances_is_a_real_matching() -> None:
    """Greedy matching would fail here: 1.4 must take 1.0's place only if nothing else needs it."""
    assert verdict([1.4, 1.0], [1.2, 1.5], unordered=True, absolute=0.25) is PASS
    assert verdict([1.0, 1.0], [1.2, 1.5], unordered=True, absolute=0.25) is FAIL
    chain = [number + 0.5 for number in range(40)]
    assert verdict(chain, list(range(40)), unordered=True, absolute=0.5) is PASS
    assert verdict(list(range(1, 41)), list(range(40)), unordered=True, absolute=1.0) is PASS


def test_paths_name_what_differs_and_what_is_left_out() -> None:
    """The explanation leads to the place; ignored and unordered paths are exact."""
    wanted = {"orders": [{"id": 1, "items": ["a", "b"], "at": 5}], "paid": True}
    found = {"orders": [{"id": 1, "items": ["b", "a"], "at": 9}], "paid": True}
    told_all = told(verifier("state"), case(found, wanted))
    assert told_all.verdict is FAIL and "orders.0.items.0" in told_all.explanation
    assert len(told_all.evidence) == 3
    assert verdict(found, wanted, ignore=["orders.*.at"], unordered=["orders.*.items"]) is PASS
    assert verdict(found, wanted, ignore=["orders.*.at"]) is FAIL
    assert verdict(found, wanted, unordered=["orders.*.items"]) is FAIL
    assert verdict({"a": 1, "*": 2}, {"a": 1}, ignore=["b"]) is FAIL


def test_subset_and_missing_keys() -> None:
    """More is allowed in a subset only, less never."""
    assert verdict({"a": 1, "b": 2}, {"a": 1}) is FAIL
    assert verdict({"a": 1, "b": 2}, {"a": 1}, mode="subset") is PASS
    assert verdict({"b": 2}, {"a": 1}, mode="subset") is FAIL


@pytest.mark.parametrize(
    ("found", "wanted"), [(True, 1), (0, False), ("1", 1), (None, 0), ([], {}), ("", None), (10**400, 1.0)]
)
def test_kinds_are_not_mixed(found: Any, wanted: Any) -> None:
    """True is not 1, and "1" is not 1."""
    assert verdict([found], [wanted]) is FAIL
    assert verdict([found], [wanted], absolute=0.5) is FAIL


def test_an_integer_equals_its_float() -> None:
    """JSON has one kind of number."""
    assert verdict([1], "[1.0]") is PASS


@pytest.mark.parametrize(
    ("hostile", "says"),
    [
        ("[" * 100_000, "nested deeper than 64"),
        ('{"a":' * 100_000, "nested deeper than 64"),
        ('{"paid": false, "paid": true}', "the same key twice"),
        ("[1e999999]", "beyond the floats"),
        ("[NaN]", "NaN"),
        ("[-Infinity]", "-Infinity"),
        ("[" + "9" * 10_000 + "]", ""),
        ("\x00\ud800", ""),
        ("", ""),
        ("[1, 2", ""),
        ("x" * 5_000_000, "at most 4000000 are read"),
    ],
)
def test_hostile_json_fails_and_says_why(hostile: str, says: str) -> None:
    """The final state cannot be read: the program's fault. Of the expected state it is not."""
    found = told(verifier("state"), case(hostile, [1]))
    assert found.verdict is FAIL and says in found.explanation
    assert told(verifier("state"), case([1], hostile)).verdict is ABSTAIN


def test_a_comparison_that_would_not_end_abstains() -> None:
    """Two lists of thousands of entries that are alike only within a tolerance cost more steps than there are."""
    many = [[number] for number in range(2000)]
    assert verdict(many, many[::-1], unordered=True, absolute=0.5) is ABSTAIN


def test_large_collections_are_compared_all_the_same() -> None:
    """Entries that are spelled alike find one another without a search, and what is left is searched."""
    many: list[Any] = [{"id": number, "tags": ["a", "b"]} for number in range(2000)]
    assert verdict(many, many[::-1], unordered=True) is PASS
    assert verdict([*many[1:], {"id": 5, "tags": []}], many, unordered=True) is FAIL
    assert verdict([{"id": 0, "tags": ["b", "a"]}, *many[:0:-1]], many, unordered=True) is PASS


def test_a_program_that_left_no_state_fails() -> None:
    """Nothing is not the expected state; the answer itself may be it."""
    assert told(verifier("state"), Case(references={"expected_state": "1"})).verdict is FAIL
    assert told(verifier("state"), Case(artefacts={"state": "1"})).verdict is ABSTAIN
    answer = Case(answer="[1]", references={"expected_state": "[1]"})
    assert told(verifier("state", reads="answer"), answer).verdict is PASS
