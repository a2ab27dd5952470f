"""LinUCB is its formula, whatever the order in which verdicts land and decisions are undone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, LawBroken, SchemaMismatch, Unprocessable
from loadwise.policy.base import Candidate, Context, Feedback
from loadwise.policy.gram import REFRESH_UPDATES, GramRows
from loadwise.policy.linear import LinUCB, LinUCBOptions
from loadwise.policy.ridge import CANDIDATES_MAX

NAMES = ("a", "b", "c")
MODES = ("gram_all", "gram_all_mean", "landed")


def pool(*names: str) -> list[Candidate]:
    """Candidates whose price rises with their place."""
    return [Candidate(name=name, price_usd=float(place)) for place, name in enumerate(names)]


def ask(policy: LinUCB, x, candidates, seed: int = 0):
    return policy.choose(Context(decision_id=0, x=x), candidates, np.random.default_rng(seed))


class Textbook:
    """The formula of A.2, written as it stands, with nothing cached."""

    def __init__(self, d: int, ridge: float, mode: str) -> None:
        self.mode = mode
        self.v = {name: ridge * np.eye(d) for name in NAMES}
        self.l = {name: ridge * np.eye(d) for name in NAMES}
        self.b = {name: np.zeros(d) for name in NAMES}

    def index(self, name: str, x, alpha: float) -> float:
        mean = self.v if self.mode == "gram_all_mean" else self.l
        width = self.l if self.mode == "landed" else self.v
        spread = np.sqrt(x @ np.linalg.solve(width[name], x))
        return float(x @ np.linalg.solve(mean[name], self.b[name]) + alpha * spread)


@st.composite
def histories(draw):
    """Decisions with contexts of any size, and an order in which each is closed or left pending."""
    d = draw(st.integers(1, 6))
    n = draw(st.integers(1, 30))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    decisions = [(NAMES[rng.integers(3)], scale * rng.normal(size=d), float(rng.random())) for _ in range(n)]
    fates = draw(st.lists(st.sampled_from(["learn", "undo", "pending"]), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    gaps = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return d, decisions, fates, order, gaps


def play(policy: LinUCB, history) -> None:
    """Observe all; close each some time after it was observed, in the drawn order."""
    _, decisions, fates, order, gaps = history
    observed: set[int] = set()
    waiting = list(order)

    def close(index: int) -> None:
        name, x, reward = decisions[index]
        if fates[index] == "learn":
            policy.learn(Feedback(decision_id=index, candidate=name, x=x, reward=reward))
        elif fates[index] == "undo":
            policy.undo(index, name, x)

    for index, (name, x, _) in enumerate(decisions):
        policy.observe(index, name, x)
        observed.add(index)
        for _ in range(gaps[index]):
            ready = next((i for i in waiting if i in observed), None)
            if ready is not None:
                waiting.remove(ready)
                close(ready)
    for index in waiting:
        close(index)


@given(histories(), st.sampled_from(MODES))
@settings(max_examples=150, deadline=None)
def test_index_is_the_formula(history, mode: str) -> None:
    """Scores equal xᵀθ + α·sqrt(xᵀV⁻¹x) of the textbook form after any interleaving of observe, learn and undo."""
    d, decisions, fates, _, _ = history
    policy = LinUCB(LinUCBOptions(gram=mode, alpha=0.6))
    play(policy, history)
    book = Textbook(d, 1.0, mode)
    for (name, x, reward), fate in zip(decisions, fates, strict=True):
        if fate != "undo":
            book.v[name] += np.outer(x, x)
        if fate == "learn":
            book.l[name] += np.outer(x, x)
            book.b[name] += reward * x
    probe = np.random.default_rng(d).normal(size=d)
    choice = ask(policy, probe, pool(*NAMES))
    assert choice.scores == pytest.approx([book.index(name, probe, 0.6) for name in NAMES], rel=1e-7, abs=1e-7)


@given(histories())
@settings(max_examples=150, deadline=None)
def test_undo_restores_the_matrices(history) -> None:
    """V after any interleaving with undo equals V of the decisions that were kept, to 1e-9; L and b never saw them."""
    _, decisions, fates, _, _ = history
    policy, plain = LinUCB(), LinUCB()
    play(policy, history)
    for index, (name, x, reward) in enumerate(decisions):
        if fates[index] != "undo":
            plain.observe(index, name, x)
        if fates[index] == "learn":
            plain.learn(Feedback(decision_id=index, candidate=name, x=x, reward=reward))
    for name in NAMES:
        if plain.ridge.counts(name) == (0, 0):
            assert policy.ridge.counts(name) == (0, 0)
            continue
        for ours, theirs in zip(policy.ridge.matrices(name), plain.ridge.matrices(name), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-9)


def test_undo_is_exact_beside_huge_contexts() -> None:
    """Terms of 10¹⁰ come and go without a trace where plain sums would keep an error of 10⁻⁶."""
    rng = np.random.default_rng(1)
    policy = LinUCB()
    small = rng.normal(size=5)
    policy.observe(0, "a", small)
    before = policy.ridge.matrices("a")[0]
    huge = [1e5 * rng.normal(size=5) for _ in range(20)]
    plain = before.copy()
    for index, x in enumerate(huge):
        policy.observe(index + 1, "a", x)
        plain += np.outer(x, x)
    for index in rng.permutation(20):
        policy.undo(int(index) + 1, "a", huge[index])
        plain -= np.outer(huge[index], huge[index])
    assert np.abs(policy.ridge.matrices("a")[0] - before).max() <= 1e-9
    assert np.abs(plain - before).max() > 1e-9


@given(st.permutations(range(12)), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_order_of_verdicts_is_immaterial(order, seed: int) -> None:
    """L and b, and so the choice, do not depend on the order in which verdicts land."""
    rng = np.random.default_rng(seed)
    decisions = [(NAMES[i % 3], rng.normal(size=4), float(rng.random())) for i in range(12)]
    policies = []
    for sequence in (range(12), order):
        policy = LinUCB()
        for index, (name, x, _) in enumerate(decisions):
            policy.observe(index, name, x)
        for index in sequence:
            name, x, reward = decisions[index]
            policy.learn(Feedback(decision_id=index, candidate=name, x=x, reward=reward))
        policies.append(policy)
    for name in NAMES:
        for ours, theirs in zip(*(policy.ridge.matrices(name) for policy in policies), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    left, right = (ask(policy, np.ones(4), pool(*NAMES)) for policy in policies)
    assert left.chosen == right.chosen
    assert left.scores == pytest.approx(right.scores, abs=1e-9)


def test_ties_go_to_the_cheaper_then_to_the_first_name() -> None:
    """With nothing learned every index is equal: price decides, then the name, in any order of listing."""
    candidates = [
        Candidate(name="z", price_usd=0.1),
        Candidate(name="y", price_usd=0.1),
        Candidate(name="x", price_usd=9),
    ]
    for listed in (candidates, candidates[::-1]):
        assert listed[ask(LinUCB(), np.ones(3), listed).chosen].name == "y"


def test_pending_decisions_spread_simultaneous_programs() -> None:
    """Before any verdict, gram_all alternates between equal candidates and landed herds on the cheap one (E.10)."""
    shares = {}
    for mode in MODES:
        policy, chosen = LinUCB(LinUCBOptions(gram=mode)), []
        for decision_id in range(20):
            index = ask(policy, np.array([1.0, 0.5]), pool("cheap", "dear")).chosen
            policy.observe(decision_id, ("cheap", "dear")[index], np.array([1.0, 0.5]))
            chosen.append(index)
        shares[mode] = sum(chosen)
    assert shares == {"gram_all": 10, "gram_all_mean": 10, "landed": 0}


def test_a_hot_added_candidate_is_tried_at_once() -> None:
    """A candidate without decisions has the prior's width, the widest there is."""
    policy = LinUCB()
    for decision_id in range(30):
        policy.observe(decision_id, "old", np.ones(2))
        policy.learn(Feedback(decision_id=decision_id, candidate="old", x=np.ones(2), reward=0.5))
    choice = ask(policy, np.ones(2), pool("old", "new"))
    assert choice.chosen == 1
    assert choice.widths[1] == pytest.approx(0.6 * np.sqrt(2))


def test_cached_inverse_stays_true_over_many_updates() -> None:
    """After thousands of rank-one updates of mixed size the cached inverse inverts the exact sum."""
    rng = np.random.default_rng(2)
    rows = GramRows(6, 1.0)
    rows.grow()
    rows.grow()
    for index in range(10 * REFRESH_UPDATES + 57):
        rows.add(index % 2, rng.normal(size=6) * 10.0 ** rng.integers(-3, 3))
    for row in (0, 1):
        np.testing.assert_allclose(rows.inverses[row] @ rows.matrix(row), np.eye(6), atol=1e-7)
        assert rows.ages[row] < REFRESH_UPDATES


def test_exploration_floor_is_played_as_reported() -> None:
    """With ε = .3 the shares of 6000 draws are the reported propensities, to three standard errors."""
    policy = LinUCB(LinUCBOptions(exploration_floor=0.3))
    candidates, rng = pool(*NAMES), np.random.default_rng(3)
    context = Context(decision_id=0, x=np.ones(2))
    choices = [policy.choose(context, candidates, rng) for _ in range(6000)]
    assert choices[0].propensities == pytest.approx((0.8, 0.1, 0.1))
    shares = np.bincount([choice.chosen for choice in choices], minlength=3) / 6000
    assert shares == pytest.approx(choices[0].propensities, abs=3 * np.sqrt(0.16 / 6000))
    assert not policy.is_deterministic


@pytest.mark.parametrize(
    "x",
    [np.array([1.0, np.nan]), np.array([np.inf, 1.0]), np.full(2, 1e200), np.full(2, 1e6), np.ones(3), np.ones((2, 1))],
)
def test_unusable_contexts_are_refused_and_change_nothing(x) -> None:
    """A context that is not finite, too long or of another shape is refused by every method, in words."""
    policy = LinUCB()
    policy.observe(0, "a", np.ones(2))
    before = policy.dump()
    for act in (
        lambda: ask(policy, x, pool("a")),
        lambda: policy.observe(1, "new", x),
        lambda: policy.undo(1, "a", x),
        lambda: policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=1.0)),
    ):
        with pytest.raises(Unprocessable, match="a context of"):
            act()
    assert policy.dump() == before


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e7])
def test_unusable_rewards_are_refused(reward: float) -> None:
    """One NaN would poison θ for ever: it is refused, in words, and nothing changes."""
    policy = LinUCB()
    policy.observe(0, "a", np.ones(2))
    before = policy.dump()
    with pytest.raises(Unprocessable, match=r"a reward of (nan|inf|-1)"):
        policy.learn(Feedback(decision_id=0, candidate="a", x=np.ones(2), reward=reward))
    assert policy.dump() == before


def test_undo_without_a_decision_breaks_l11() -> None:
    """Undoing what was never observed is a bug of the caller, and said so before V is spoiled."""
    policy = LinUCB()
    policy.observe(0, "a", np.ones(2))
    policy.undo(0, "a", np.ones(2))
    for name in ("a", "never"):
        with pytest.raises(LawBroken, match="L11"):
            policy.undo(0, name, np.ones(2))


def test_candidates_are_bounded() -> None:
    """Law L15: the table of candidates has a limit, and says so."""
    policy = LinUCB()
    for index in range(CANDIDATES_MAX):
        policy.observe(index, f"m{index}", np.ones(1))
    with pytest.raises(Unprocessable, match=f"at most {CANDIDATES_MAX}"):
        policy.observe(0, "one too many", np.ones(1))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (LinUCB(LinUCBOptions(alpha=0.7)), "alpha=0.6; here alpha=0.7"),
        (LinUCB(LinUCBOptions(gram="landed")), "gram='gram_all'; here gram='landed'"),
        (LinUCB(LinUCBOptions(n_features=3)), "2 features; here 3"),
        (LinUCB(LinUCBOptions(context_version="v2")), "context_version=''; here context_version='v2'"),
    ],
)
def test_a_dump_of_another_configuration_is_refused(other: LinUCB, words: str) -> None:
    """Loading what was learned under other options names the option and both values, and changes nothing."""
    policy = LinUCB()
    policy.observe(0, "a", np.ones(2))
    before = other.dump()
    with pytest.raises(SchemaMismatch, match=words):
        other.load(policy.dump())
    assert other.dump() == before


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -0.1},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"ridge": 0.0},
        {"ridge": float("nan")},
        {"exploration_floor": 1.0},
        {"exploration_floor": -0.01},
        {"exploration_floor": float("nan")},
        {"n_features": 0},
        {"n_features": 513},
        {"gram": "none"},
    ],
)
def test_options_out_of_range_are_refused(options) -> None:
    """Every number is bounded; the error names the option and the value."""
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} is "):
        LinUCBOptions(**options)


def test_learns_which_candidate_suits_which_context() -> None:
    """On a bed where the best candidate depends on a feature, LinUCB beats the best single one by far."""
    rng, policy, earned = np.random.default_rng(4), LinUCB(), 0.0
    for decision_id in range(400):
        x = np.array([1.0, rng.choice([-1.0, 1.0])])
        index = ask(policy, x, pool("a", "b")).chosen
        success = 0.9 if (index == 1) == (x[1] > 0) else 0.1
        policy.observe(decision_id, ("a", "b")[index], x)
        policy.learn(
            Feedback(decision_id=decision_id, candidate=("a", "b")[index], x=x, reward=float(rng.random() < success))
        )
        earned += success
    assert earned / 400 > 0.8  # either single candidate earns .5
