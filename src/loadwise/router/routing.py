"""Which model a program gets: candidates, context, choice, and the record of it."""

from collections.abc import Sequence

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel.ids import DecisionId, ModelId
from loadwise.kernel.pool import Signal
from loadwise.kernel.streams import Streams
from loadwise.ledger.forecast import Forecast
from loadwise.policy.base import Candidate, Choice, Context, Vector

from .admission import Admission
from .backends import Backends
from .config import RouterConfig
from .credit import FOREIGN, Credit, Pending
from .divert import Divert
from .program import Program, Turn
from .successes import Successes


class Routing:
    """Asks the learner, lets the divert rule have its say, writes the decision down and makes it pending."""

    def __init__(
        self,
        config: RouterConfig,
        backends: Backends,
        admission: Admission,
        credit: Credit,
        divert: Divert,
        streams: Streams,
    ) -> None:
        self._config = config
        self._backends = backends
        self._admission = admission
        self._credit = credit
        self._divert = divert
        self._streams = streams
        self._context_version = config.context.version
        self.successes = Successes(config.context.task_types)
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
        backends, max_age_s = self._backends, self._config.signal_max_age_s
        n_running, n_others = 0, 0.0
        ratios: list[float] = []
        usages: list[float] = []
        e2es_s: list[float] = []
        for b in ids:
            ratios.append(self._admission.ledger.headroom_ratio(b, at_s=at_s))
            n_running += backends.by_id[b].n_running
            n_others += backends.n_others(b, at_s, max_age_s)
            usage = backends.kv_usage_ratio(b, at_s, max_age_s)
            if usage is not None:
                usages.append(usage)
            e2e_s = backends.signal(b, "e2e_s", at_s, max_age_s)
            if e2e_s is not None:
                e2es_s.append(e2e_s)
        return Candidate(
            name=model_id,
            price_usd=(3.0 * price.input + price.output) / 4.0,
            n_running=n_running,
            n_held=len(self._admission.order_by_model[model_id]),
            headroom_ratio=max(ratios, default=0.0),
            n_others=n_others,
            kv_usage_ratio=min(usages, default=None),
            e2e_s=sum(e2es_s) / len(e2es_s) if e2es_s else None,
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
        turn: Turn | None = None,
        unaffordable: tuple[ModelId, ...] = (),
    ) -> c.RecordDecision:
        """Choose among `models`, or take the `named` one, and bind the program to it.

        Args:
            turn: the program's first, for which a place is sought; with it the divert rule may overrule the choice.
        """
        x = self.context(program)
        forecasts = self._forecasts(program, models, turn, at_s)
        candidates = [self.candidate(m, at_s) for m in models]
        if forecasts is not None:
            candidates = [
                msgspec.structs.replace(k, wait_s=f.wait_s) for k, f in zip(candidates, forecasts, strict=True)
            ]
        recorded = _recorded_choice(self.recorded.get(decision_id), models) if named is None else None
        if named is not None:
            is_certain = reason == "pinned"
            choice = _named_choice(models.index(named), len(models), 1.0 if is_certain else named_propensity)
        elif recorded is None:
            context = Context(
                decision_id=decision_id, x=x, at_s=at_s, task_type=program.task_type, domain=program.domain
            )
            choice = self._credit.choose(context, candidates, slot, self._streams.at("policy", decision_id))
        else:
            choice = recorded
        routed = choice.chosen
        successes = self._successes(program, models, choice) if self._config.divert.is_on else []
        if forecasts is not None and recorded is None and self._config.divert.when == "arrival":
            luck = float(self._streams.at("divert", decision_id).random())
            choice = self._divert.divert(choice, models, successes, [f.wait_s for f in forecasts], luck)
        elif recorded is not None:
            said = self.recorded[decision_id].routed
            routed = models.index(said) if said is not None and said in models else routed
        chosen = models[choice.chosen]
        is_diverted = routed != choice.chosen
        program.model, program.decision_id = chosen, decision_id
        program.is_paused = False  # another model's cache has nothing to do with it
        program.routed_model = models[routed] if is_diverted else None
        own = self._own_forecast(chosen, turn, program, at_s) if forecasts is None else forecasts[choice.chosen]
        self._remember(program, models, successes, models[routed], own, at_s)
        self._credit.await_verdict(
            Pending(
                decision_id=decision_id,
                program_id=program.program_id,
                model=chosen,
                x=x,
                slot=slot,
                choice=choice if choice.propensities is None and named is None and not is_diverted else None,
                learner_version=FOREIGN if reason == c.ESCALATION else self._credit.version,
            )
        )
        return c.RecordDecision(
            decision_id=decision_id,
            program_id=program.program_id,
            policy=self._config.policy.name,
            learner_version=self._credit.version,
            context_version=self._context_version,
            context=tuple(x.tolist()),
            candidates=self._views(candidates, choice, at_s, successes, forecasts, own),
            chosen=chosen,
            reason="policy_fallback" if choice.is_fallback else "divert" if is_diverted else reason,
            slot=slot,
            routed=models[routed] if is_diverted else None,
            unaffordable=unaffordable,
        )

    def _forecasts(
        self, program: Program, models: Sequence[ModelId], turn: Turn | None, at_s: float
    ) -> list[Forecast] | None:
        """Every model's wait, where the divert rule is to be asked."""
        if turn is None or not self._config.divert.is_on or len(models) < 2 or program.is_pinned:
            return None
        return [self._divert.waiting.forecast(m, turn, program, at_s) for m in models]

    def _own_forecast(self, chosen: ModelId, turn: Turn | None, program: Program, at_s: float) -> Forecast | None:
        """The wait for the chosen model where no rule needs one, but somebody waits for it already."""
        if turn is None or not self._admission.order_by_model[chosen]:
            return None
        return self._divert.waiting.forecast(chosen, turn, program, at_s)

    def _successes(self, program: Program, models: Sequence[ModelId], choice: Choice) -> list[float]:
        """Expected success by model: the selector's index, or the table of verdicts where it has none."""
        if len(choice.scores) == len(models):
            return list(choice.scores)
        return [self.successes.estimate(program.task_type, m) for m in models]

    def _remember(
        self,
        program: Program,
        models: Sequence[ModelId],
        successes: Sequence[float],
        routed: ModelId,
        forecast: Forecast | None,
        at_s: float,
    ) -> None:
        """Keep what a later look at a held program needs, and what its wait was expected to be."""
        if self._config.divert.is_on and not program.estimates:
            program.estimates = dict(zip(models, successes, strict=True))
            if program.admitted_at_s is None and not (program.is_pinned or program.attempts or program.tried_models):
                self._divert.note_routed(program, routed)
        is_known = forecast is not None and forecast.base.middle_s > 0.0
        program.forecast = forecast.base if forecast is not None and is_known else None
        program.forecast_from_s = at_s

    def _signals(self, model_id: ModelId, at_s: float) -> dict[str, Signal]:
        """What is known of a model's backends, as `backend/name`; what is too old is unknown (law L10)."""
        max_age_s = self._config.signal_max_age_s
        known: dict[str, Signal] = {}
        for b in self._backends.all_of(model_id):
            for name, signal in self._backends.by_id[b].signals.items():
                if signal.fresh(at_s, max_age_s) is not None:
                    known[f"{b}/{name}"] = signal
        return known

    def _views(
        self,
        candidates: Sequence[Candidate],
        choice: Choice,
        at_s: float,
        successes: Sequence[float],
        forecasts: Sequence[Forecast] | None,
        own: Forecast | None,
    ) -> tuple[c.CandidateView, ...]:
        views = []
        for i, candidate in enumerate(candidates):
            forecast = forecasts[i] if forecasts is not None else own if i == choice.chosen else None
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
                    expected_success=None if forecasts is None else successes[i],
                    wait_s=None if forecast is None else forecast.wait_s,
                    wait_low_s=None if forecast is None else forecast.low_s,
                    wait_high_s=None if forecast is None else forecast.high_s,
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
