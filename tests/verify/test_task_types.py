"""Task types are told from examples: without a prior, with an abstention, and whatever the text is."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.verify.task_types import (
    NOTHING_TOLD,
    RIDGE,
    Rule,
    SelectionSpec,
    TypeSelector,
    fit,
    margins,
    require_distinct,
    take_evenly,
)
from loadwise.verify.task_types_text import PLACES, RUNS_WEIGHT, SHAPES_WEIGHT, WORDS_WEIGHT, clip, describe

EXAMPLES = {
    "patch": ["Fix the crash in parser.py when the file is empty.", "The test of `Reader.close` fails, repair it."],
    "support": ["Hello, I would like to return my shoes.", "My order has not arrived, where is it?"],
    "sums": ["What is 3 + 4 * 17?", "Solve 2x = 10 for x."],
}
RULES: tuple[Rule, ...] = ("ridge", "prototype")


def selector(rule: Rule = "ridge", margin: float | None = None, **examples: list[str]) -> TypeSelector:
    """A selector without an embedding."""
    return TypeSelector(
        SelectionSpec(rule=rule, margin=margin),
        {name: [describe(text) for text in texts] for name, texts in (examples or EXAMPLES).items()},
    )


def clouds(n: int, seed: int, spread: float = 0.1) -> dict[str, list[np.ndarray]]:
    """n unit vectors around each of three directions."""
    rng = np.random.default_rng(seed)
    made = {}
    for at, name in enumerate("abc"):
        vectors = np.eye(16)[at] + spread * rng.normal(size=(n, 16))
        made[name] = list((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    return made


@pytest.mark.parametrize("rule", RULES)
def test_a_new_text_is_of_the_type_that_it_resembles(rule: Rule) -> None:
    """Words and shapes alone tell texts of clearly different kinds."""
    tells = selector(rule, 0.0).tell
    assert tells(describe("The parser crashes when the test file is empty. Fix it.")).task_type == "patch"
    assert tells(describe("Hello, where is my order? I would like to return it.")).task_type == "support"
    assert tells(describe("What is 17 * 4 + 3?")).task_type == "sums"


@pytest.mark.parametrize("rule", RULES)
def test_vectors_near_a_direction_are_of_its_type(rule: Rule) -> None:
    """The centre of each cloud is told with a margin above the default."""
    tells = TypeSelector(SelectionSpec(rule=rule), clouds(5, 0)).tell
    for at, name in enumerate("abc"):
        told = tells(np.eye(16, dtype=np.float32)[at])
        assert (told.task_type, told.nearest) == (name, name)
        assert told.margin > 0.1


def test_the_paper_s_rule_is_the_cosine_to_the_mean() -> None:
    """`prototype` scores are cosines to the mean of each type's examples (B.3)."""
    examples = clouds(4, 1, spread=0.5)
    x = np.concatenate([np.stack(vectors) for vectors in examples.values()]).astype(np.float64)
    owner = np.repeat([0, 1, 2], 4)
    probe = np.random.default_rng(2).normal(size=16)
    probe /= np.linalg.norm(probe)
    means = np.stack([x[owner == c].mean(axis=0) for c in range(3)])
    cosines = means @ probe / np.linalg.norm(means, axis=1)
    np.testing.assert_allclose(fit("prototype", x @ x.T, owner, 3).scores(x @ probe), cosines, rtol=1e-9)


def test_the_ridge_rule_solves_its_regression() -> None:
    """The dual solution is the primal one: centred weighted ridge regression on the one-hot types."""
    rng = np.random.default_rng(3)
    x, owner = rng.normal(size=(9, 5)), np.array([0, 0, 0, 0, 0, 1, 1, 2, 2])
    linear = fit("ridge", x @ x.T, owner, 3)
    weight = 9 / (3 * np.bincount(owner)[owner])
    mean = weight @ x / 9
    centred = x - mean
    ridge = RIDGE * weight @ (centred**2).sum(axis=1) / 9
    primal = np.linalg.solve(
        centred.T @ (weight[:, None] * centred) + ridge * np.eye(5),
        centred.T @ (weight[:, None] * (np.eye(3)[owner] - 1 / 3)),
    )
    probe = rng.normal(size=(7, 5))
    np.testing.assert_allclose(linear.scores(probe @ x.T), (probe - mean) @ primal, atol=1e-10)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(0, 1000))
def test_more_examples_are_no_prior(counts: list[int], seed: int) -> None:
    """Where the types' means balance, all scores are zero, however many examples each type has."""
    rng = np.random.default_rng(seed)
    owner = np.repeat([0, 1, 2], counts)
    x = rng.normal(size=(len(owner), 8))
    centre = np.mean([x[owner == at].mean(axis=0) for at in range(3)], axis=0)
    np.testing.assert_allclose(fit("ridge", x @ x.T, owner, 3).scores(x @ centre), 0.0, atol=1e-9)


@given(st.permutations(range(6)), st.integers(0, 100))
def test_the_order_of_types_and_examples_does_not_matter(order: list[int], seed: int) -> None:
    """Shuffled types and examples tell the same, up to rounding."""
    examples = clouds(2, seed, spread=0.5)
    pairs = [(name, vector) for name, vectors in examples.items() for vector in vectors]
    shuffled: dict[str, list[np.ndarray]] = {}
    for at in order:
        shuffled.setdefault(pairs[at][0], []).append(pairs[at][1])
    probe = np.random.default_rng(seed).normal(size=16).astype(np.float32)
    one, other = (TypeSelector(SelectionSpec(), given).tell(probe) for given in (examples, shuffled))
    assert abs(one.margin - other.margin) < 1e-5
    if one.margin > 1e-4:
        assert one.nearest == other.nearest


@pytest.mark.parametrize("rule", RULES)
def test_what_lies_between_two_types_is_not_told(rule: Rule) -> None:
    """A request as near to one type as to another gets no type, and with it no verifier; its margin is zero."""
    examples = {name: [np.eye(16, dtype=np.float32)[at]] for at, name in enumerate("abc")}
    between = (np.eye(16)[0] + np.eye(16)[1]).astype(np.float32) / np.sqrt(2).astype(np.float32)
    told = TypeSelector(SelectionSpec(rule=rule), examples).tell(between)
    assert told.task_type is None and told.nearest in ("a", "b")
    assert told.margin < 1e-6
    # A tie decides nothing even where no margin is asked for.
    exact = TypeSelector(SelectionSpec(rule=rule, margin=0.0), dict.fromkeys("ab", examples["a"])).tell(between)
    assert exact.task_type is None


def test_a_text_unlike_every_example_is_not_told() -> None:
    """With the default margin a text of another alphabet and topic has no type."""
    assert selector().tell(describe("今日は天気がいいですね")).task_type is None


def test_few_examples_abstain_more_often() -> None:
    """The margin of the ridge rule grows with what the examples know: one example a type is not trusted as five are."""
    probes = [vector for vectors in clouds(40, 9, spread=0.4).values() for vector in vectors]
    kept = []
    for n in (1, 5, 20):
        tells = TypeSelector(SelectionSpec(), clouds(n, 4, spread=0.4)).tell
        kept.append(sum(tells(probe).task_type is not None for probe in probes))
    assert kept[0] < kept[1] <= kept[2]


def test_a_margin_of_two_tells_nothing_and_none_tells_everything() -> None:
    """The margin is a limit that its user sets."""
    text = describe("The parser crashes. Fix the test.")
    assert selector(margin=2.0).tell(text).task_type is None
    assert selector(margin=2.0).tell(text).nearest == "patch"
    assert selector(margin=0.0).tell(text).task_type == "patch"


@pytest.mark.parametrize("vector", [np.zeros(16), np.full(16, np.nan), np.full(16, np.inf)], ids=["zero", "nan", "inf"])
def test_a_vector_that_says_nothing_tells_nothing(vector: np.ndarray) -> None:
    """What an embedder got wrong is an abstention, not a type."""
    with np.errstate(invalid="ignore"):
        assert TypeSelector(SelectionSpec(), clouds(2, 0)).tell(vector.astype(np.float32)) == NOTHING_TOLD


def test_examples_in_the_wrong_place_are_found() -> None:
    """An example that the others take for another type is named with its place."""
    examples = clouds(5, 6)
    examples["a"][3] = examples["b"][0]
    found = TypeSelector(SelectionSpec(), examples).confused()
    assert ("a", 3, "b") in found
    assert TypeSelector(SelectionSpec(), clouds(5, 6)).confused() == []
    # One other example of a type is no evidence.
    assert TypeSelector(SelectionSpec(), clouds(2, 6, spread=9.0)).confused() == []


def test_two_types_with_examples_are_needed() -> None:
    """One type cannot be told from anything."""
    with pytest.raises(ConfigError, match="1 task types have examples"):
        selector(patch=EXAMPLES["patch"], support=[])


def test_the_same_example_of_two_types_is_refused() -> None:
    """A contradiction in a pool file is named, white space apart."""
    with pytest.raises(ConfigError, match="'a' and 'b' have the same example: 'Fix it'"):
        require_distinct({"a": ["Fix it"], "b": [" Fix it\n"]})
    require_distinct({"a": ["x", "x", ""], "b": ["", "y"]})


@pytest.mark.parametrize("margin", [-0.1, 2.1, float("nan")])
def test_the_margin_has_limits(margin: float) -> None:
    """The error names the key and the limit."""
    with pytest.raises(ConfigError, match=r"task_selector margin is .*\[0, 2\]"):
        SelectionSpec(margin=margin)


def test_margins_of_one_type_are_zero() -> None:
    """There is no second best."""
    assert margins(np.array([[0.7]])).tolist() == [0.0]
    assert margins(np.array([[0.1, 0.7, 0.4]])).tolist() == [pytest.approx(0.3)]


@given(st.lists(st.lists(st.text(max_size=3), max_size=5), max_size=4), st.integers(0, 12))
def test_examples_are_taken_evenly(texts: list[list[str]], limit: int) -> None:
    """At most `limit`, and no type gives two more than another that has some left."""
    given_texts = {str(at): of for at, of in enumerate(texts)}
    taken = take_evenly(given_texts, limit)
    assert sum(map(len, taken.values())) <= limit
    for name, of in taken.items():
        left = len({text for text in given_texts[name] if text.strip()}) - len(of)
        assert left == 0 or all(len(other) <= len(of) + 1 for other in taken.values())


@settings(max_examples=50)
@given(st.text(max_size=300))
def test_a_description_is_finite_and_of_known_length(text: str) -> None:
    """Any text, hostile ones too: three bags, each of its own length or empty."""
    x = describe(text)
    assert x.shape == (3 * PLACES,)
    assert np.isfinite(x).all()
    for bag, weight in zip(x.reshape(3, PLACES), (WORDS_WEIGHT, RUNS_WEIGHT, SHAPES_WEIGHT), strict=True):
        assert np.linalg.norm(bag) == pytest.approx(0.0) or (bag @ bag) == pytest.approx(weight, rel=1e-4)


def test_a_description_holds_the_embedding_unchanged() -> None:
    """The product of two descriptions is the weighted sum of their cosines."""
    one, two = np.array([0.6, 0.8]), np.array([1.0, 0.0])
    product = float(describe("a b", one) @ describe("a b", two))
    # Three characters make no run of four.
    assert product == pytest.approx(0.6 + WORDS_WEIGHT + SHAPES_WEIGHT, abs=1e-5)


@pytest.mark.parametrize("text", ["\ud800 half", "x" * 10_000_000, "[" * 100_000, "\x00" * 500, "a\u0301" * 500, ""])
def test_hostile_texts_are_described_within_bounds(text: str) -> None:
    """A lone surrogate, ten megabytes, nested brackets and nothing at all are texts like any other."""
    begun_at_s = time.process_time()
    assert np.isfinite(describe(text)).all()
    assert len(clip(text)) <= 6145
    assert time.process_time() - begun_at_s < 5.0


def test_what_lies_in_the_middle_of_a_long_text_changes_nothing() -> None:
    """Only the first 4,096 and the last 2,048 characters are read."""
    begin, end = "begin " * 700, " end" * 600
    assert (describe(begin + "one" * 5000 + end) == describe(begin + "two" * 5000 + end)).all()
    assert (describe("other" + begin + end) != describe(begin + end)).any()
