"""A fence around policies that are not ours: whatever a user's class raises or returns, a choice comes out.

Theory of operation. A class outside this room may raise anywhere, return nonsense, or change what it was given. Every
call goes through `Guarded`, which takes errors for what they are, tells `report` of each, and answers by a stated rule:
the cheapest candidate, ties to the first name, reported as certain (`Choice.is_fallback`). The rule asks nothing but
the candidates, so a replay falls back where the live run did.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadwise.kernel.errors import LawBroken, SchemaMismatch
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Feedback, Forgetter, Policy, Unlearner, Vector
from .checks import check_propensities
from .picking import best_index, certain

Report = Callable[[str, bool], None]
"""Told of every error of a user's policy, in words, and whether an event has led to it (a dump is none)."""

_OURS = __name__.rpartition(".")[0] + "."


def guarded(policy: Policy, report: Report) -> Policy:
    """The policy itself where it is one of ours, else a fence around it."""
    return policy if type(policy).__module__.startswith(_OURS) else Guarded(policy, report)


def unlearner(policy: Policy) -> Unlearner | None:
    """The policy as one that can take a verdict back; None where it cannot."""
    if isinstance(policy, Guarded):
        return policy if policy.can_unlearn else None
    found: Any = policy
    return found if callable(getattr(policy, "unlearn", None)) else None


def forgetter(policy: Policy) -> Forgetter | None:
    """The policy as one that can begin anew with a candidate; None where it cannot."""
    if isinstance(policy, Guarded):
        return policy if policy.can_forget else None
    found: Any = policy
    return found if callable(getattr(policy, "forget", None)) else None


def fall_back(candidates: Sequence[Candidate]) -> Choice:
    """The choice where a policy made none: the cheapest candidate, ties to the first name.

    >>> fall_back([Candidate(name="dear", price_usd=9.0), Candidate(name="cheap", price_usd=1.0)]).chosen
    1
    """
    chosen = best_index([0.0] * len(candidates), candidates)
    return Choice(chosen=chosen, propensities=certain(chosen, len(candidates)), is_fallback=True)


class Guarded:
    """A policy of a user's that cannot stop its router.

    Args:
        policy: any object that has the contract's methods.
        report: is told of each call that raised or answered nonsense.
    """

    def __init__(self, policy: Policy, report: Report) -> None:
        self.inner = policy
        self._report = report
        self.name = str(policy.name)
        self.reads = tuple(policy.reads)
        self.is_deterministic = bool(policy.is_deterministic)

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """What the policy chooses, if that is a choice; else the fallback."""
        own = msgspec.structs.replace(context, x=context.x.copy())  # the decision is remembered under it
        try:
            return sound_choice(self.inner.choose(own, tuple(candidates), rng), len(candidates))
        except Exception as error:
            self._tell("choose", error)
            return fall_back(candidates)

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """The policy's estimate; empty where it has none to offer."""
        try:
            return sound_propensities(self.inner.propensities(choice, rng), choice.chosen)
        except Exception as error:
            self._tell("propensities", error)
            return ()

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Pass it on."""
        self._call("observe", decision_id, candidate, x.copy())

    def learn(self, feedback: Feedback) -> None:
        """Pass it on."""
        self._call("learn", msgspec.structs.replace(feedback, x=feedback.x.copy()))

    @property
    def can_unlearn(self) -> bool:
        """Whether a wrong verdict can be put right."""
        return callable(getattr(self.inner, "unlearn", None))

    def unlearn(self, feedback: Feedback) -> None:
        """Pass it on."""
        self._call("unlearn", msgspec.structs.replace(feedback, x=feedback.x.copy()))

    @property
    def can_forget(self) -> bool:
        """Whether it can begin anew with a candidate."""
        return callable(getattr(self.inner, "forget", None))

    def forget(self, candidate: str) -> None:
        """Pass it on."""
        self._call("forget", candidate)

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Pass it on."""
        self._call("undo", decision_id, candidate, x.copy())

    def dump(self) -> bytes:
        """What the policy has learned; empty where it cannot say."""
        try:
            state = self.inner.dump()
            if not isinstance(state, bytes):
                raise TypeError(f"dump returned {type(state).__name__}, not bytes")
            return state
        except Exception as error:
            self._tell("dump", error)
            return b""

    def load(self, state: bytes) -> None:
        """Pass it on.

        Raises:
            SchemaMismatch: the policy refuses the state, and may be half loaded.
        """
        try:
            self.inner.load(state)
        except Exception as error:
            self._tell("load", error)
            raise SchemaMismatch(f"policy {self.name!r} cannot load its state: {_words(error)}") from error

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.inner, method)(*arguments)
        except Exception as error:
            self._tell(method, error)

    def _tell(self, method: str, error: Exception) -> None:
        self._report(f"policy {self.name!r}: {method} failed: {_words(error)}", method not in ("dump", "load"))


def sound_choice(said: Any, n_candidates: int) -> Choice:
    """A choice in plain numbers.

    Raises:
        Exception: it is none of `n_candidates` candidates, or one of its numbers is not finite or one too many.
    """
    if not isinstance(said, Choice):
        raise TypeError(f"choose returned {type(said).__name__}, not a Choice")
    chosen = operator.index(said.chosen)
    if not 0 <= chosen < n_candidates:
        raise ValueError(f"number {chosen} of {n_candidates} candidates was chosen")
    scores, means, widths = (_sound_numbers(name, said, n_candidates) for name in ("scores", "means", "widths"))
    propensities = None if said.propensities is None else sound_propensities(said.propensities, chosen)
    if propensities is not None and len(propensities) != n_candidates:
        raise ValueError(f"{len(propensities)} propensities for {n_candidates} candidates")
    return Choice(chosen=chosen, scores=scores, means=means, widths=widths, propensities=propensities)


def _sound_numbers(name: str, said: Choice, n_candidates: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in getattr(said, name))
    if values and not (len(values) == n_candidates and all(map(math.isfinite, values))):
        raise ValueError(f"{name} are {values!r} for {n_candidates} candidates")
    return values


def sound_propensities(said: Any, chosen: int) -> tuple[float, ...]:
    """Propensities in plain numbers.

    Raises:
        Exception: law L12 does not hold for them.
    """
    values = tuple(float(value) for value in said)
    check_propensities(values, chosen, len(values))
    return values


def _words(error: Exception) -> str:
    try:
        text = error.story if isinstance(error, LawBroken) else str(error)
    except Exception:  # its own words may fail as well
        text = "?"
    return f"{type(error).__name__}: {text[:200]}"
