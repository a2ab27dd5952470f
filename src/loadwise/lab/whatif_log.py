"""What a journal says that what-if can use: decisions, the propensities they were drawn with, and what they earned.

A decision counts where chance chose it and the chance is on record. Left out, and counted by reason:

    pinned            a client named the model
    fallback          another model took over after failures; the decision it replaces counts as `superseded`
    escalation        a further attempt, taken because the one before it failed
    policy_fallback   a user's policy failed, and the cheapest model was taken
    other_context     its context has another meaning than those at the journal's end

A decision that was never judged (lost, abstained, undone or still open) stays: its context is evidence, its outcome is
missing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.journal.entry import Entry
from loadwise.kernel.commands import RecordCredit, RecordDecision
from loadwise.kernel.errors import Error
from loadwise.kernel.events import BackendAdded, TurnArrived, VerdictArrived
from loadwise.kernel.pool import ModelSpec
from loadwise.kernel.work import VerdictKind
from loadwise.policy.base import Candidate

Array = npt.NDArray[np.float64]

DRAWN = frozenset({"policy", "selector", "selector_fallback"})
"""Reasons of decisions that a policy's chance may have made."""

MISSING_MAX_RATIO = 0.2
"""Of the drawn decisions, this share may lack propensities; beyond it, those that have some speak for nobody else."""

OUTCOMES = ("success", "cost_usd", "reward")


class Refusal(Error):
    """The journal cannot answer the question; the message says what it lacks."""

    code = "no_support"


class Logged(NamedTuple):
    """One decision."""

    decision_id: int
    candidates: tuple[Candidate, ...]
    propensities: tuple[float, ...]
    chosen: int
    x: Array
    at_s: float
    task_type: str | None
    domain: str | None
    outcome: tuple[float, float, float] | None
    """`OUTCOMES`; None where it was never judged."""

    @property
    def is_drawn(self) -> bool:
        """Whether more than one candidate had a chance."""
        return sum(p > 0.0 for p in self.propensities) > 1


class Log(NamedTuple):
    """The decisions that count, in the order they were made."""

    decisions: tuple[Logged, ...]
    models: tuple[str, ...]
    """Every candidate of some decision, sorted."""
    excluded: Mapping[str, int]
    """Decisions left out, by reason."""
    n_abstained: int
    policies: tuple[str, ...]
    """Learner versions that decided."""


class _Read:
    """Everything of a journal, before it is sorted out."""

    def __init__(self, models: Mapping[str, ModelSpec]) -> None:
        self.price_usd = {name: _blended_usd(spec) for name, spec in models.items()}
        self.decisions: dict[int, tuple[RecordDecision, float]] = {}
        self.late: dict[int, tuple[float, ...]] = {}
        self.credits: dict[int, RecordCredit] = {}
        self.kind_by_program: dict[str, tuple[str | None, str | None]] = {}
        self.latest: dict[str, int] = {}
        self.superseded: set[int] = set()
        self.n_abstained = 0

    def hear(self, entry: Entry) -> None:
        event = entry.event
        match event:
            case TurnArrived():
                if event.task_type is not None or event.domain is not None:
                    self.kind_by_program.setdefault(event.program_id, (event.task_type, event.domain))
            case VerdictArrived():
                self.n_abstained += event.verdict.verdict is VerdictKind.ABSTAIN
            case BackendAdded(model=ModelSpec() as model):
                self.price_usd.setdefault(event.backend.model, _blended_usd(model))
        for decision in entry.decisions:
            if decision.reason == "fallback" and decision.program_id in self.latest:
                self.superseded.add(self.latest[decision.program_id])
            self.latest[decision.program_id] = decision.decision_id
            self.decisions[decision.decision_id] = (decision, event.at_s)
        for record in entry.propensities:
            self.late[record.decision_id] = record.propensities
        for credit in entry.credits:
            self.credits[credit.decision_id] = credit  # a correction comes later, and stands
            if credit.is_withdrawn:
                del self.credits[credit.decision_id]


def read_log(entries: Iterable[Entry], models: Mapping[str, ModelSpec]) -> Log:
    """The decisions of a journal.

    Args:
        models: of the journal's configuration, for their prices.

    Raises:
        Refusal: no decision counts, too many lack propensities, or the policy that decided leaves nothing to chance.
    """
    read = _Read(models)
    for entry in entries:
        read.hear(entry)
    if not read.decisions:
        raise Refusal("the journal holds no decision")
    version = next(reversed(read.decisions.values()))[0].context_version
    excluded: Counter[str] = Counter()
    silent: list[RecordDecision] = []
    kept: list[Logged] = []
    for decision, at_s in read.decisions.values():
        reason = _why_not(decision, version, read)
        if reason is not None:
            excluded[reason] += 1
            continue
        propensities = _propensities(decision, read)
        if propensities is None:
            silent.append(decision)
        else:
            kept.append(_logged(decision, at_s, propensities, read))
    if silent:
        excluded["no_propensity"] = len(silent)
        _require_few(silent, len(kept))
    _require_chance(kept, excluded)
    names = sorted({candidate.name for one in kept for candidate in one.candidates})
    versions = {decision.learner_version: None for decision, _ in read.decisions.values() if decision.reason in DRAWN}
    return Log(tuple(kept), tuple(names), dict(excluded), read.n_abstained, tuple(versions))


def _why_not(decision: RecordDecision, version: str, read: _Read) -> str | None:
    if decision.reason not in DRAWN:
        return decision.reason
    if decision.decision_id in read.superseded:
        return "superseded"
    return "other_context" if decision.context_version != version else None


def _propensities(decision: RecordDecision, read: _Read) -> tuple[float, ...] | None:
    """As recorded with the decision or after it; None where they are absent or no distribution (law L12)."""
    found: Any = read.late.get(decision.decision_id) or [view.propensity for view in decision.candidates]
    if len(found) != len(decision.candidates) or any(p is None or not 0.0 <= p <= 1.0 for p in found):
        return None
    chosen = [view.candidate for view in decision.candidates].index(decision.chosen)
    if found[chosen] <= 0.0 or abs(sum(found) - 1.0) > 1e-6:
        return None
    return tuple(found)


def _logged(decision: RecordDecision, at_s: float, propensities: tuple[float, ...], read: _Read) -> Logged:
    credit = read.credits.get(decision.decision_id)
    task_type, domain = read.kind_by_program.get(decision.program_id, (None, None))
    candidates = tuple(
        Candidate(
            name=view.candidate,
            price_usd=read.price_usd.get(view.candidate, 0.0),
            n_running=view.n_running,
            n_held=view.n_held,
            headroom_ratio=1.0 if view.headroom_ratio is None else view.headroom_ratio,
        )
        for view in decision.candidates
    )
    return Logged(
        decision_id=decision.decision_id,
        candidates=candidates,
        propensities=propensities,
        chosen=[candidate.name for candidate in candidates].index(decision.chosen),
        x=np.array(decision.context, dtype=np.float64),
        at_s=at_s,
        task_type=task_type,
        domain=domain,
        outcome=None if credit is None else (credit.success, credit.cost_usd, credit.reward),
    )


def _blended_usd(spec: ModelSpec) -> float:
    """As the router shows a model to its policies."""
    price = spec.usd_per_million
    return (3.0 * price.input + price.output) / 4.0


def _require_few(silent: list[RecordDecision], n_kept: int) -> None:
    if len(silent) <= MISSING_MAX_RATIO * (n_kept + len(silent)):
        return
    ids = ", ".join(str(decision.decision_id) for decision in silent[:5])
    policies = ", ".join(sorted({decision.policy for decision in silent}))
    raise Refusal(
        f"{len(silent)} of {n_kept + len(silent)} decisions have no recorded propensity (policy {policies}, decisions"
        f" {ids}{', ...' if len(silent) > 5 else ''}); at most {MISSING_MAX_RATIO:.0%} may lack one"
    )


def _require_chance(kept: list[Logged], excluded: Mapping[str, int]) -> None:
    if not kept:
        counted = ", ".join(f"{n} {reason}" for reason, n in excluded.items())
        raise Refusal(f"no decision of the journal was left to a policy's chance ({counted})")
    if any(len(one.candidates) > 1 for one in kept) and not any(one.is_drawn for one in kept):
        raise Refusal(
            f"the policy that wrote this journal leaves nothing to chance: all {len(kept)} decisions were certain, so "
            "it says nothing of what another choice would have brought. Preset loadwise keeps an exploration floor"
        )
