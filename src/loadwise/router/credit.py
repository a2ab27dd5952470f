"""Decisions that await their verdict, and what a verdict earns.

One learner is shared by all programs (ORACLE, section 4.2.2) unless the arm `per_slot` gives every slot its own. A
pending decision keeps the context it was made in, because credit belongs to that context and to the model that ran.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from loadwise.kernel.errors import SchemaMismatch
from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import DecisionId, ModelId, ProgramId
from loadwise.kernel.streams import Generator, Streams
from loadwise.policy.base import Candidate, Choice, Context, Feedback, Policy, Vector
from loadwise.policy.drift import Drift
from loadwise.policy.guarded import Guarded, Report, forgetter, guarded, unlearner
from loadwise.policy.registry import PolicySpec, Resolve, make_policy
from loadwise.policy.ridge import REWARD_MAX
from loadwise.verify.debias import ErrorRates

from .config import RouterConfig

SETTLED_MAX = 4096
"""Judged, or given up: as many decisions are remembered for a correction."""

FOREIGN = ""
"""The learner version of decisions that no learner of ours has observed; their verdicts teach nobody."""


class Pending:
    """One decision without its verdict."""

    __slots__ = ("choice", "decision_id", "learner_version", "model", "program_id", "slot", "x")

    def __init__(
        self,
        *,
        decision_id: DecisionId,
        program_id: ProgramId,
        model: ModelId,
        x: Vector,
        slot: int,
        choice: Choice | None,
        learner_version: str,
    ) -> None:
        self.decision_id = decision_id
        self.program_id = program_id
        self.model = model
        self.x = x
        self.slot = slot
        self.choice = choice
        """Kept only while its propensities are still to be estimated."""
        self.learner_version = learner_version


class Settled(NamedTuple):
    """A decision that is pending no more: what it earned, or None where it was undone."""

    pending: Pending
    reward: float | None
    n_learned: int = 0
    """How many verdicts its learner had learned from then."""


class Corrected(NamedTuple):
    """The reward that a decision had, and the one that it has now; None where it has none."""

    before: float | None
    after: float | None


class CreditState(Fact, frozen=True, kw_only=True):
    """A dump of `Credit`."""

    version: str
    learners: list[bytes]
    pending: list[tuple[int, str, str, list[float], int, Choice | None, str]]
    n_landed: int
    n_undone: int
    settled: list[tuple[int, str, str, list[float], int, str, float | None]] = []
    n_learned: list[int] = []
    """Verdicts learned from, by learner."""
    settled_at: list[int] = []
    """`Settled.n_learned`, in the order of `settled`."""


class Credit:
    """The learners and the decisions they wait for."""

    def __init__(self, config: RouterConfig, streams: Streams, resolve: Resolve | None, report: Report) -> None:
        self._reward = config.reward
        self._streams = streams
        n_learners = config.feedback.size if config.feedback.arm == "per_slot" else 1
        self._make_learners = partial(_learners, n_learners, config, resolve, report)
        self.learners = self._make_learners()
        self.version = f"{config.policy.name}-{_digest(config.policy)}/{config.context.version}"
        self.pending_by_decision: dict[DecisionId, Pending] = {}
        self.settled_by_decision: dict[DecisionId, Settled] = {}
        """The latest `SETTLED_MAX` of them, so that a verdict on them can still be corrected."""
        self.n_landed = 0
        self.n_undone = 0
        self._n_learned = [0] * n_learners

    def choose(self, context: Context, candidates: Sequence[Candidate], slot: int, rng: Generator) -> Choice:
        """Ask the slot's learner."""
        return self.learners[slot].choose(context, candidates, rng)

    def await_verdict(self, pending: Pending) -> None:
        """Count a decision as made: its learner hears of it now, its verdict comes later."""
        self.pending_by_decision[pending.decision_id] = pending
        if pending.learner_version == self.version:
            self.learners[pending.slot].observe(pending.decision_id, pending.model, pending.x)

    def land(
        self, decision_id: DecisionId, success: float, cost_usd: float, rates: ErrorRates | None = None
    ) -> float | None:
        """Learn from a verdict. Returns the reward, or None where the decision is not pending (law L11).

        Args:
            rates: how often the verifier is wrong; None takes its word.
        """
        pending = self.pending_by_decision.pop(decision_id, None)
        if pending is None:
            return None
        value = self._value(success, cost_usd, rates)
        if pending.learner_version == self.version:
            self._learn(pending, value)
        self.n_landed += 1
        self._settle(pending, value)
        return value

    def _learn(self, pending: Pending, value: float) -> None:
        self.learners[pending.slot].learn(_feedback(pending, value))
        self._n_learned[pending.slot] += 1

    def _value(self, success: float, cost_usd: float, rates: ErrorRates | None) -> float:
        estimate = success if rates is None else rates.debiased(success)
        return min(max(self._reward.reward_of_estimate(estimate, cost_usd), -REWARD_MAX), REWARD_MAX)

    def undo(self, decision_id: DecisionId | None) -> None:
        """The decision will never be judged."""
        self._undo(decision_id)

    def give_up(self, decision_id: DecisionId | None) -> None:
        """No verdict has come, or none that says anything: undone, but a correction may still come."""
        pending = self._undo(decision_id)
        if pending is not None:
            self._settle(pending, None)

    def _undo(self, decision_id: DecisionId | None) -> Pending | None:
        pending = None if decision_id is None else self.pending_by_decision.pop(decision_id, None)
        if pending is not None:
            if pending.learner_version == self.version:
                self.learners[pending.slot].undo(pending.decision_id, pending.model, pending.x)
            self.n_undone += 1
        return pending

    def _settle(self, pending: Pending, reward: float | None) -> None:
        pending.choice = None
        self.settled_by_decision[pending.decision_id] = Settled(pending, reward, self._n_learned_by(pending))
        while len(self.settled_by_decision) > SETTLED_MAX:
            del self.settled_by_decision[next(iter(self.settled_by_decision))]

    def _n_learned_by(self, pending: Pending) -> int:
        """How many verdicts the decision's learner has learned from; 0 where it is none of ours."""
        return self._n_learned[pending.slot] if pending.learner_version == self.version else 0

    def forget(self, decision_id: DecisionId | None) -> None:
        """The decision's program leaves memory: nothing of it can be corrected any more."""
        if decision_id is not None:
            self.settled_by_decision.pop(decision_id, None)

    def correct(
        self, decision_id: DecisionId, success: float | None, cost_usd: float, rates: ErrorRates | None = None
    ) -> Corrected | None:
        """Take back what a settled decision has earned, and learn from another verdict instead.

        Args:
            success: None where the new verdict is an abstention.

        Returns:
            The rewards before and after; None where the decision is not remembered, or its policy cannot unlearn: then
            nothing has changed.
        """
        settled = self.settled_by_decision.get(decision_id)
        if settled is None:
            return None
        pending, before, n_learned = settled
        after = None if success is None else self._value(success, cost_usd, rates)
        if pending.learner_version == self.version and not self._relearn(settled, after):
            return None
        if before is None:
            n_learned = self._n_learned_by(pending)
        self.n_landed += (after is not None) - (before is not None)
        self.n_undone -= (after is not None) - (before is not None)
        self.settled_by_decision[decision_id] = Settled(pending, after, n_learned)
        return Corrected(before, after)

    def _relearn(self, settled: Settled, after: float | None) -> bool:
        """Bring the learner from one reward to another; False where it cannot."""
        pending, before, n_learned = settled
        learner = self.learners[pending.slot]
        if before is not None:
            able = unlearner(learner)
            if able is None:
                return False
            able.unlearn(_feedback(pending, before, age=self._n_learned[pending.slot] - n_learned))
            if after is not None:
                learner.learn(_feedback(pending, after))
        elif after is not None:
            learner.observe(pending.decision_id, pending.model, pending.x)
            self._learn(pending, after)
        if after is None and before is not None:
            learner.undo(pending.decision_id, pending.model, pending.x)
        return True

    @property
    def can_forget(self) -> bool:
        """Whether the policy can begin anew with one model."""
        return all(forgetter(learner) is not None for learner in self.learners)

    def forget_model(self, model: ModelId) -> None:
        """Every learner begins anew with a model; those that cannot go on as they are."""
        for learner in self.learners:
            able = forgetter(learner)
            if able is not None:
                able.forget(model)

    def alarms(self) -> dict[str, int]:
        """How often each model has counted as changed, over all learners; empty where the policy watches for none."""
        total: dict[str, int] = {}
        for learner in self.learners:
            if isinstance(learner, Drift):
                for model, n in learner.alarms.items():
                    total[model] = total.get(model, 0) + n
        return total

    def slot(self, decision_id: DecisionId | None) -> int:
        """Whose learner decided; the first where the decision is not pending."""
        pending = None if decision_id is None else self.pending_by_decision.get(decision_id)
        return 0 if pending is None else pending.slot

    def late_propensities(self, decision_id: DecisionId | None) -> tuple[float, ...] | None:
        """Estimate propensities that were too costly on the decision path; None where they are known already."""
        pending = None if decision_id is None else self.pending_by_decision.get(decision_id)
        if pending is None or pending.choice is None:
            return None
        choice, pending.choice = pending.choice, None
        rng = self._streams.at("propensity", pending.decision_id)
        return self.learners[pending.slot].propensities(choice, rng) or None

    def dump(self) -> CreditState:
        """State as plain values."""
        rows: list[tuple[int, str, str, list[float], int, Choice | None, str]] = [
            (p.decision_id, p.program_id, p.model, p.x.tolist(), p.slot, p.choice, p.learner_version)
            for p in self.pending_by_decision.values()
        ]
        return CreditState(
            version=self.version,
            learners=[learner.dump() for learner in self.learners],
            pending=rows,
            n_landed=self.n_landed,
            n_undone=self.n_undone,
            settled=[
                (p.decision_id, p.program_id, p.model, p.x.tolist(), p.slot, p.learner_version, reward)
                for p, reward, _ in self.settled_by_decision.values()
            ],
            n_learned=self._n_learned,
            settled_at=[settled.n_learned for settled in self.settled_by_decision.values()],
        )

    def load(self, state: CreditState) -> None:
        """Continue from a dump. Learners of another version are not taken over: a new learner version begins."""
        is_same = state.version == self.version and len(state.learners) == len(self.learners)
        if is_same:
            is_same = self._load_learners(state.learners)
        self.pending_by_decision = {
            DecisionId(row[0]): Pending(
                decision_id=DecisionId(row[0]),
                program_id=ProgramId(row[1]),
                model=ModelId(row[2]),
                x=np.asarray(row[3], dtype=np.float64),
                slot=row[4],
                choice=row[5] if is_same else None,
                learner_version=row[6] if is_same else FOREIGN,
            )
            for row in state.pending
        }
        if is_same and state.n_learned:
            self._n_learned = list(state.n_learned)
        settled_at = state.settled_at or [0] * len(state.settled)
        self.settled_by_decision = {
            DecisionId(row[0]): Settled(
                Pending(
                    decision_id=DecisionId(row[0]),
                    program_id=ProgramId(row[1]),
                    model=ModelId(row[2]),
                    x=np.asarray(row[3], dtype=np.float64),
                    slot=row[4],
                    choice=None,
                    learner_version=row[5] if is_same else FOREIGN,
                ),
                row[6],
                n_learned,
            )
            for row, n_learned in zip(state.settled, settled_at, strict=True)
        }
        self.n_landed, self.n_undone = state.n_landed, state.n_undone

    def _load_learners(self, dumped: list[bytes]) -> bool:
        """Load all. A user's policy that could not be dumped, or cannot load, begins anew, and the others with it."""
        try:
            for learner, state in zip(self.learners, dumped, strict=True):
                if not state:
                    raise SchemaMismatch("a learner could not be dumped")
                learner.load(state)
        except SchemaMismatch:
            if not any(isinstance(learner, Guarded) for learner in self.learners):
                raise
            self.learners = self._make_learners()
            return False
        return True


def _feedback(pending: Pending, reward: float, *, age: int = 0) -> Feedback:
    return Feedback(decision_id=pending.decision_id, candidate=pending.model, x=pending.x, reward=reward, age=age)


def _learners(n: int, config: RouterConfig, resolve: Resolve | None, report: Report) -> list[Policy]:
    return [guarded(make_policy(config.policy, config.context, resolve), report) for _ in range(n)]


def _digest(policy: PolicySpec) -> str:
    """Eight hexadecimal digits that change with the policy's options: another option, another learner."""
    return hashlib.sha256(msgspec.json.encode(policy, order="deterministic")).hexdigest()[:8]
