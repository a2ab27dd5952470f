"""Which model a program gets: candidates, context, choice, and the record of it."""

from collections.abc import Sequence

from loadwise.kernel import commands as c
from loadwise.kernel.ids import DecisionId, ModelId
from loadwise.kernel.pool import Signal
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Choice, Context, Vector

from .admission import Admission
from .backends import Backends
from .config import RouterConfig
from .credit import FOREIGN, Credit, Pending
from .program import Program


class Routing:
    """Asks the learner, writes the decision down and makes it pending."""

    def __init__(
        self, config: RouterConfig, backends: Backends, admission: Admission, credit: Credit, streams: Streams
    ) -> None:
        self._config = config
        self._backends = backends
        self._admission = admission
        self._credit = credit
        self._streams = streams
        self.n_decisions = 0
        self.recorded: dict[DecisionId, c.RecordDecision] = {}
        """Decisions of the event at hand as they were made once; see `kernel.machine.Follower`."""

    def next_decision_id(self) -> DecisionId:
        """A number that no decision has had."""
        self.n_decisions += 1
        return DecisionId(self.n_decisions)

    def models(self, at_s: float, exclude: frozenset[ModelId] = frozenset()) -> list[ModelId]:
        """Models with a backend that takes new programs, in the order of the pool file."""
        return [m for m in self._backends.model_by_id if m not in exclude and self._backends.usable(m, at_s)]

    def models_for_new(self, at_s: float) -> list[ModelId]:
        """As `models`; where there is none, those of which a backend comes back while a turn may be held for it."""
        limit_s = at_s + self._config.hold_max_s
        return self.models(at_s) or [
            m for m in self._backends.model_by_id if self._backends.returns_at_s(m, at_s) <= limit_s
        ]

    def context(self, program: Program) -> Vector:
        """The program's feature vector, shape (d,)."""
        return self._config.context.features(program.task_type, program.domain, program.components)

    def candidate(self, model_id: ModelId, at_s: float) -> Candidate:
        """A model as a candidate: its price and the load of its backends taken together."""
        price = self._backends.price(model_id)
        ids = self._backends.usable(model_id, at_s) or self._backends.all_of(model_id)
        ratios = [self._admission.ledger.headroom_ratio(b, at_s=at_s) for b in ids]
        return Candidate(
            name=model_id,
            price_usd=(3.0 * price.input + price.output) / 4.0,
            n_running=sum(self._backends.by_id[b].n_running for b in ids),
            n_held=len(self._admission.order_by_model[model_id]),
            headroom_ratio=max(ratios, default=0.0),
        )

    def decide(
        self,
        program: Program,
        models: Sequence[ModelId],
        *,
        decision_id: DecisionId,
        slot: int,
        at_s: float,
        reason: str,
        named: ModelId | None = None,
        named_propensity: float | None = None,
        unaffordable: tuple[ModelId, ...] = (),
    ) -> c.RecordDecision:
        """Choose among `models`, or take the `named` one, and bind the program to it."""
        x = self.context(program)
        candidates = [self.candidate(m, at_s) for m in models]
        if named is None:
            context = Context(
                decision_id=decision_id, x=x, at_s=at_s, task_type=program.task_type, domain=program.domain
            )
            choice = _recorded_choice(self.recorded.get(decision_id), models)
            if choice is None:
                choice = self._credit.choose(context, candidates, slot, self._streams.at("policy", decision_id))
        else:
            is_certain = reason == "pinned"
            choice = _named_choice(models.index(named), len(models), 1.0 if is_certain else named_propensity)
        chosen = models[choice.chosen]
        program.model, program.decision_id = chosen, decision_id
        self._credit.await_verdict(
            Pending(
                decision_id=decision_id,
                program_id=program.program_id,
                model=chosen,
                x=x,
                slot=slot,
                choice=choice if choice.propensities is None and named is None else None,
                learner_version=FOREIGN if reason == c.ESCALATION else self._credit.version,
            )
        )
        return c.RecordDecision(
            decision_id=decision_id,
            program_id=program.program_id,
            policy=self._config.policy.name,
            learner_version=self._credit.version,
            context_version=self._config.context.version,
            context=tuple(x.tolist()),
            candidates=self._views(candidates, choice, at_s),
            chosen=chosen,
            reason="policy_fallback" if choice.is_fallback else reason,
            slot=slot,
            unaffordable=unaffordable,
        )

    def _signals(self, model_id: ModelId, at_s: float) -> dict[str, Signal]:
        """What is known of a model's backends, as `backend/name`; what is too old is unknown (law L10)."""
        max_age_s = self._config.signal_max_age_s
        return {
            f"{b}/{name}": signal
            for b in self._backends.all_of(model_id)
            for name, signal in self._backends.by_id[b].signals.items()
            if signal.fresh(at_s, max_age_s) is not None
        }

    def _views(self, candidates: Sequence[Candidate], choice: Choice, at_s: float) -> tuple[c.CandidateView, ...]:
        views = []
        for i, candidate in enumerate(candidates):
            views.append(
                c.CandidateView(
                    candidate=candidate.name,
                    score=choice.scores[i] if choice.scores else None,
                    mean=choice.means[i] if choice.means else None,
                    width=choice.widths[i] if choice.widths else None,
                    propensity=choice.propensities[i] if choice.propensities is not None else None,
                    n_running=candidate.n_running,
                    n_held=candidate.n_held,
                    headroom_ratio=candidate.headroom_ratio,
                    signals=self._signals(ModelId(candidate.name), at_s),
                )
            )
        return tuple(views)


def _recorded_choice(recorded: c.RecordDecision | None, models: Sequence[ModelId]) -> Choice | None:
    """The choice that a decision records; None where there is none, or it was among other candidates."""
    if recorded is None or [view.candidate for view in recorded.candidates] != list(models):
        return None
    views = recorded.candidates
    return Choice(
        chosen=models.index(recorded.chosen),
        scores=_whole([view.score for view in views]) or (),
        means=_whole([view.mean for view in views]) or (),
        widths=_whole([view.width for view in views]) or (),
        propensities=_whole([view.propensity for view in views]),
        is_fallback=recorded.reason == "policy_fallback",
    )


def _whole(values: list[float | None]) -> tuple[float, ...] | None:
    known = tuple(value for value in values if value is not None)
    return known if len(known) == len(values) else None


def _named_choice(index: int, n_candidates: int, propensity: float | None) -> Choice:
    """A choice that somebody else made, with the propensity that was told, or with none: silence is not certainty."""
    if n_candidates == 1:
        propensity = 1.0
    if propensity is None:
        return Choice(chosen=index)
    rest = (1.0 - propensity) / max(n_candidates - 1, 1)
    return Choice(chosen=index, propensities=tuple(propensity if i == index else rest for i in range(n_candidates)))
