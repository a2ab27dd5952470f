"""The contract of `policy.base.Policy` as checks that any policy, ours or a user's, must pass.

    import pytest
    from loadwise.policy.checks import check_policy

    @pytest.mark.parametrize("check", check_policy(MyPolicy), ids=lambda check: check.name)
    def test_contract(check):
        check.run()

Each check makes fresh policies from the factory, is deterministic, and raises AssertionError with what it saw.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadwise.kernel.errors import Error, LawBroken
from loadwise.kernel.streams import Generator, Streams

from .base import Candidate, Choice, Context, Feedback, Policy

SUM_TOLERANCE = 1e-9
"""How far propensities may sum from one."""

Factory = Callable[[], Policy]


class Check(NamedTuple):
    """One clause of the contract."""

    name: str
    run: Callable[[], None]


def check_propensities(propensities: Sequence[float], chosen: int, n_candidates: int) -> None:
    """Law L12: one number per candidate, none negative, summing to one, positive for the chosen.

    >>> check_propensities((0.25, 0.75), 1, 2)

    Raises:
        LawBroken: L12, with the story.
    """
    story = f"propensities {tuple(propensities)!r} of {n_candidates} candidates, chosen {chosen!r}"
    if not 0 <= chosen < n_candidates or len(propensities) != n_candidates:
        raise LawBroken("L12", story)
    if not all(0.0 <= value <= 1.0 + SUM_TOLERANCE for value in propensities):
        raise LawBroken("L12", f"{story}: one is outside [0, 1]")
    if not abs(math.fsum(propensities) - 1.0) <= SUM_TOLERANCE:
        raise LawBroken("L12", f"{story}: they sum to {math.fsum(propensities)!r}")
    if not propensities[chosen] > 0.0:
        raise LawBroken("L12", f"{story}: the chosen one's is not positive")


def check_policy(factory: Factory, n_features: int = 4) -> Iterator[Check]:
    """Every check for the policies that `factory` makes.

    Args:
        factory: returns a fresh policy, the same at every call.
        n_features: the length of contexts that it takes.
    """
    suite = _Suite(factory, n_features)
    yield Check("choose_does_not_mutate", suite.choose_does_not_mutate)
    yield Check("propensities_sum_to_one", suite.propensities_sum_to_one)
    yield Check("deterministic_reports_one", suite.deterministic_reports_one)
    yield Check("equal_seed_equal_choices", suite.equal_seed_equal_choices)
    yield Check("order_of_candidates_is_immaterial", suite.order_of_candidates_is_immaterial)
    yield Check("survives_one_candidate", suite.survives_one_candidate)
    yield Check("survives_new_and_removed_candidates", suite.survives_new_and_removed_candidates)
    yield Check("survives_huge_and_zero_contexts", suite.survives_huge_and_zero_contexts)
    yield Check("undo_is_exact", suite.undo_is_exact)
    yield Check("dump_and_load_continue_identically", suite.dump_and_load_continue_identically)
    yield Check("refuses_a_foreign_dump", suite.refuses_a_foreign_dump)
    yield Check("memory_does_not_grow", suite.memory_does_not_grow)
    yield Check("beats_random", suite.beats_random)


_POOL = (
    Candidate(name="a", price_usd=2.0, n_running=3, headroom_ratio=0.4),
    Candidate(name="b", price_usd=0.5, n_running=1, n_held=1, headroom_ratio=0.7),
    Candidate(name="c", price_usd=1.0, n_held=2, headroom_ratio=0.1),
)
_NEW = Candidate(name="new", price_usd=0.1)


class _Suite:
    def __init__(self, factory: Factory, n_features: int) -> None:
        self._factory = factory
        self._n_features = n_features

    # -- the checks, in the order of check_policy ---------------------------------------------------------------------

    def choose_does_not_mutate(self) -> None:
        policy = self._trained(40)
        before = policy.dump()
        for decision_id in range(20):
            choice = policy.choose(self._context(decision_id), _POOL, self._rng(decision_id))
            policy.propensities(choice, self._rng(decision_id))
            policy.choose(self._context(decision_id), (*_POOL, _NEW), self._rng(decision_id))
        _require(policy.dump() == before, "choose or propensities changed the policy: its dump differs")

    def propensities_sum_to_one(self) -> None:
        policy = self._trained(40)
        for decision_id in range(20):
            for pool in (_POOL, _POOL[:2], (*_POOL, _NEW)):
                self._lawful(policy, decision_id, pool)

    def deterministic_reports_one(self) -> None:
        policy = self._trained(40)
        if not policy.is_deterministic:
            return
        for decision_id in range(20):
            choices = [policy.choose(self._context(decision_id), _POOL, self._rng(seed)) for seed in (1, 2, 3)]
            chosen = {choice.chosen for choice in choices}
            _require(len(chosen) == 1, f"a deterministic policy chose {sorted(chosen)} by seed")
            propensity = self._propensities(policy, choices[0], decision_id)[choices[0].chosen]
            _require(propensity == 1.0, f"a deterministic policy reported {propensity!r} for its choice, not 1")

    def equal_seed_equal_choices(self) -> None:
        first, second = self._trained(40), self._trained(40)
        for decision_id in range(20):
            ours = first.choose(self._context(decision_id), _POOL, self._rng(decision_id))
            theirs = second.choose(self._context(decision_id), _POOL, self._rng(decision_id))
            _require(ours == theirs, f"decision {decision_id}: equal state and seed gave {ours} and {theirs}")
            _require(
                self._propensities(first, ours, decision_id) == self._propensities(second, theirs, decision_id),
                f"decision {decision_id}: equal state and seed gave different propensities",
            )

    def order_of_candidates_is_immaterial(self) -> None:
        for policy in (self._factory(), self._trained(40)):
            if not policy.is_deterministic:
                return
            for decision_id in range(20):
                names = set()
                for pool in (_POOL, _POOL[::-1], (_POOL[1], _POOL[2], _POOL[0])):
                    names.add(pool[self._choose(policy, decision_id, pool).chosen].name)
                _require(len(names) == 1, f"decision {decision_id}: the order of candidates chose among {names}")

    def survives_one_candidate(self) -> None:
        for policy in (self._factory(), self._trained(40)):
            for candidate in (*_POOL, _NEW):
                choice = self._lawful(policy, 1, (candidate,))
                _require(choice.chosen == 0, f"of one candidate number {choice.chosen} was chosen")

    def survives_new_and_removed_candidates(self) -> None:
        policy = self._trained(40)
        for decision_id, pool in enumerate([(*_POOL, _NEW), _POOL[:1], (_NEW, _POOL[2]), (_NEW,), _POOL] * 4):
            choice = self._lawful(policy, decision_id, pool)
            name, x = pool[choice.chosen].name, self._context(decision_id).x
            policy.observe(decision_id, name, x)
            policy.learn(Feedback(decision_id=decision_id, candidate=name, x=x, reward=0.5))

    def survives_huge_and_zero_contexts(self) -> None:
        policy = self._trained(40)
        for decision_id, size in enumerate([0.0, 1e-300, 1e-9, 1e3, 1e5]):
            x = np.full(self._n_features, size / math.sqrt(self._n_features))
            choice = policy.choose(Context(decision_id=decision_id, x=x), _POOL, self._rng(decision_id))
            check_propensities(self._propensities(policy, choice, decision_id), choice.chosen, len(_POOL))
            numbers = (*choice.scores, *choice.means, *choice.widths)
            _require(all(math.isfinite(n) for n in numbers), f"a context of length {size} gave {choice}")
            name = _POOL[choice.chosen].name
            policy.observe(decision_id, name, x)
            policy.learn(Feedback(decision_id=decision_id, candidate=name, x=x, reward=1.0))
        self._lawful(policy, 99, _POOL)

    def undo_is_exact(self) -> None:
        for scale in (1.0, 1e5):
            plain, detoured = self._trained(30), self._trained(30)
            ids = range(1000, 1012)
            for decision_id in ids:
                detoured.observe(decision_id, _POOL[decision_id % 3].name, scale * self._context(decision_id).x)
            _train(plain, self._context, range(30, 45))
            _train(detoured, self._context, range(30, 45))
            for decision_id in sorted(ids, key=lambda i: (i * 7) % 12):
                detoured.undo(decision_id, _POOL[decision_id % 3].name, scale * self._context(decision_id).x)
            for decision_id in range(20):
                left, right = (self._choose(policy, decision_id, _POOL) for policy in (plain, detoured))
                _require(
                    left.chosen == right.chosen and _near(left, right),
                    f"decisions undone left a trace: {right} instead of {left}",
                )

    def dump_and_load_continue_identically(self) -> None:
        original, copy = self._trained(40), self._factory()
        copy.load(original.dump())
        _require(copy.dump() == original.dump(), "a dump loaded and dumped again differs")
        for policy in (original, copy):
            _train(policy, self._context, range(40, 320))
        for decision_id in range(20):
            left, right = (self._choose(policy, decision_id, _POOL) for policy in (original, copy))
            _require(left == right, f"after load decision {decision_id} was {right} instead of {left}")
        _require(copy.dump() == original.dump(), "the loaded policy learned something else")

    def refuses_a_foreign_dump(self) -> None:
        policy = self._trained(10)
        before = policy.dump()
        for foreign in (b"", b"\x00garbage", before[: len(before) // 2]):
            try:
                policy.load(foreign)
            except Error:
                _require(policy.dump() == before, f"a refused dump of {len(foreign)} bytes changed the policy")
            else:
                raise AssertionError(f"{foreign[:16]!r}... ({len(foreign)} bytes) was loaded as a dump")

    def memory_does_not_grow(self) -> None:
        policy = self._trained(50)
        sizes = [len(policy.dump()) + _held_bytes(policy)]
        for start in (50, 450):
            _train(policy, self._context, range(start, start + 400), undo_every=5)
            sizes.append(len(policy.dump()) + _held_bytes(policy))
        # Counters may take a few bytes more; anything kept for each decision takes thousands.
        _require(sizes[2] - sizes[0] < 1024, f"50, 450 and 850 closed decisions hold {sizes} bytes")

    def beats_random(self) -> None:
        if not self._is_learner():
            return
        ours = self._score()
        _require(ours >= 0.58, f"mean reward {ours:.3f} in the last half of the toy bed; chance earns 0.5")

    # -- how they are run ---------------------------------------------------------------------------------------------

    def _rng(self, decision_id: int) -> Generator:
        return Streams(11).at("checks", decision_id)

    def _context(self, decision_id: int) -> Context:
        x = np.random.default_rng([3, decision_id]).normal(size=self._n_features)
        x[0] = 1.0
        return Context(decision_id=decision_id, x=x, at_s=float(decision_id))

    def _trained(self, n_decisions: int) -> Policy:
        policy = self._factory()
        _train(policy, self._context, range(n_decisions))
        return policy

    def _choose(self, policy: Policy, decision_id: int, pool: Sequence[Candidate]) -> Choice:
        return policy.choose(self._context(decision_id), pool, self._rng(decision_id))

    def _propensities(self, policy: Policy, choice: Choice, decision_id: int) -> tuple[float, ...]:
        if choice.propensities is not None:
            return choice.propensities
        return policy.propensities(choice, self._rng(decision_id))

    def _lawful(self, policy: Policy, decision_id: int, pool: Sequence[Candidate]) -> Choice:
        choice = self._choose(policy, decision_id, pool)
        check_propensities(self._propensities(policy, choice, decision_id), choice.chosen, len(pool))
        return choice

    def _is_learner(self) -> bool:
        policy = self._factory()
        x = self._context(1).x
        policy.observe(1, "a", x)
        before = policy.dump()
        policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=0.7))
        return policy.dump() != before

    def _score(self, n_decisions: int = 600, delay: int = 8) -> float:
        """Mean expected reward of the last half of a bed where chance earns one half, verdicts `delay` late."""
        policy = self._factory()
        luck = np.random.default_rng(5)
        pending: list[Feedback] = []
        earned = 0.0
        for decision_id in range(n_decisions):
            x = np.zeros(self._n_features)
            x[0] = 1.0
            x[-1] = 1.0 if luck.random() < 0.5 else -1.0
            choice = policy.choose(Context(decision_id=decision_id, x=x), _POOL, self._rng(decision_id))
            # Chance earns .5; the best single candidate .7; who sees the context .75.
            success = (0.5 + 0.2 * x[-1], 0.3 - 0.1 * x[-1], 0.7 - 0.1 * x[-1])[choice.chosen]
            name = _POOL[choice.chosen].name
            policy.observe(decision_id, name, x)
            reward = float(luck.random() < success)
            pending.append(Feedback(decision_id=decision_id, candidate=name, x=x, reward=reward))
            if len(pending) > delay:
                policy.learn(pending.pop(0))
            earned += success if decision_id >= n_decisions // 2 else 0.0
        return earned / (n_decisions - n_decisions // 2)


def _train(policy: Policy, context: Callable[[int], Context], ids: Sequence[int], undo_every: int = 0) -> None:
    """Observe each decision, and later, out of order, learn it or (every `undo_every`-th) undo it."""
    for decision_id in ids:
        policy.observe(decision_id, _POOL[decision_id % 3].name, context(decision_id).x)
    for decision_id in sorted(ids, key=lambda i: (i * 5) % 16):
        name, x = _POOL[decision_id % 3].name, context(decision_id).x
        if undo_every and decision_id % undo_every == 0:
            policy.undo(decision_id, name, x)
        else:
            reward = float(((decision_id % 3) + decision_id // 3) % 2)
            policy.learn(Feedback(decision_id=decision_id, candidate=name, x=x, reward=reward))


def _near(left: Choice, right: Choice) -> bool:
    pairs = zip((*left.scores, *left.means, *left.widths), (*right.scores, *right.means, *right.widths), strict=True)
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in pairs)


def _held_bytes(policy: Policy) -> int:
    """Roughly what a policy holds on to: arrays, bytes and the items of containers, each object once."""
    seen: set[int] = set()
    todo: list[Any] = [policy]
    total = 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            total += thing.nbytes if thing.base is None else 0
        elif isinstance(thing, str | bytes):
            total += len(thing)
        elif isinstance(thing, dict):
            total += 64 * len(thing)
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            total += 16 * len(thing)
            todo += thing
        elif hasattr(thing, "__dict__"):
            todo.append(vars(thing))
    return total


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


__all__ = ["SUM_TOLERANCE", "Check", "Factory", "check_policy", "check_propensities"]
