"""How long a program would wait for a model, and whether it had better run on another.

The divert rule (ORACLE, Eq. 4) compares success and wait on one scale:

    S_m = (1 - beta) a_m - beta * s(w_m / w0),   s(u) = min(u, 1) in the paper

with a_m the selector's index of the model, or the success table's estimate where the selector has none. The best S
wins, the incumbent keeps ties. The paper asks once, at the program's first turn. Since nothing of a held program is
cached anywhere, asking again while it waits is free, and later answers are better ones: with `when: held` programs are
bound late. They stand in the line of the model that the selector chose, and whenever another has room to spare,
`best_move` takes the one from the line that loses least by going there, if the line is long enough for that.

An exploring choice is not overruled, or exploration would end where load begins (law L12): of a policy with a floor,
what it drew by chance stays, and so does the share of the best choice that chance would have drawn.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from loadwise.kernel.ids import ModelId, ProgramId, TurnId
from loadwise.policy.base import Choice

from .admission import Admission
from .backends import Backends
from .config import RouterConfig
from .forgone import Forgone
from .program import Program, Turn
from .waiting import Waiting

PLACES_MAX = 64
"""Held programs of one model that are looked at for a move: those next to start gain least by it, so from the front."""


class Move(NamedTuple):
    """A held program that had better start elsewhere now."""

    turn: Turn
    program: Program
    model: ModelId


class Divert:
    """Compares success against forecast waits; changes nothing."""

    def __init__(self, config: RouterConfig, backends: Backends, admission: Admission) -> None:
        self._config = config
        self._admission = admission
        self._backends = backends
        self.waiting = Waiting(config, backends, admission)
        self.forgone = Forgone()

    # --- the rule ---

    def score(self, success: float, wait_s: float, run_s: float = 0.0) -> float:
        """S_m: success against wait."""
        beta, w0 = self._config.trade.wait_weight, self._config.trade.wait_reference_s
        ratio = (wait_s + (run_s if self._config.divert.prices_run else 0.0)) / w0
        saturation = self._config.divert.saturation
        if saturation == "clip":
            ratio = min(ratio, 1.0)
        elif saturation == "soft":
            ratio = ratio / (1.0 + ratio)
        return (1.0 - beta) * success - beta * ratio

    def score_of(self, model_id: ModelId, success: float, wait_s: float) -> float:
        """S_m of a model, with its run time where that is priced."""
        return self.score(self.expected(model_id, success), wait_s, self._run_s(model_id))

    def expected(self, model_id: ModelId, success: float) -> float:
        """Expected success; where overdue programs are counted, only of those that end within their budget."""
        if not self._config.divert.counts_overdue:
            return success
        return success * self._admission.demand_by_model[model_id].finished_ratio

    def _run_s(self, model_id: ModelId) -> float:
        return self._admission.demand_by_model[model_id].expected_run_s

    def target(
        self, incumbent: int, models: Sequence[ModelId], successes: Sequence[float], waits_s: Sequence[float]
    ) -> int:
        """The index of the model that a program had better run on; the incumbent on ties."""
        scores = [self.score_of(m, a, w) for m, a, w in zip(models, successes, waits_s, strict=True)]
        goes = [self.expected(m, a) for m, a in zip(models, successes, strict=True)]
        open_to = [i for i, m in enumerate(models) if i == incumbent or self._is_open(m, goes[incumbent], goes[i])]
        best = max(open_to, key=lambda i: (scores[i], i == incumbent))
        return best if scores[best] > scores[incumbent] else incumbent

    def best(self, models: Sequence[ModelId], successes: Sequence[float], waits_s: Sequence[float]) -> int:
        """The index of the model where a program runs best that has none any more."""
        scores = [self.score_of(m, a, w) for m, a, w in zip(models, successes, waits_s, strict=True)]
        return scores.index(max(scores))

    def divert(
        self,
        choice: Choice,
        models: Sequence[ModelId],
        successes: Sequence[float],
        waits_s: Sequence[float],
        luck: float,
    ) -> Choice:
        """The choice after the rule, with the propensities of what runs.

        Args:
            luck: uniform in [0, 1); decides whether a best choice counts as drawn by chance.
        """
        propensities = choice.propensities
        greedy = _greedy(choice)
        kept = [_kept_share(i, greedy, propensities) for i in range(len(models))]
        targets = [self.target(i, models, successes, waits_s) for i in range(len(models))]
        chosen = choice.chosen if luck < kept[choice.chosen] else targets[choice.chosen]
        after: tuple[float, ...] | None = None
        if propensities is not None:
            mass = [p * k for p, k in zip(propensities, kept, strict=True)]
            for i, j in enumerate(targets):
                mass[j] += propensities[i] * (1.0 - kept[i])
            after = tuple(mass)
        return Choice(
            chosen=chosen,
            scores=choice.scores,
            means=choice.means,
            widths=choice.widths,
            propensities=after,
            is_fallback=choice.is_fallback,
        )

    # --- while held ---

    def best_move(
        self,
        models: Sequence[ModelId],
        turns: Mapping[TurnId, Turn],
        programs: Mapping[ProgramId, Program],
        at_s: float,
    ) -> Move | None:
        """The held program that had better start on another model at once, if there is one.

        Whoever leaves a line moves all behind one place forward, so what a departure is worth is the wait of the last
        in line, whoever it is that departs. Hence the smallest success gap in the line is held against that wait.
        """
        found: list[tuple[float, int, Move]] = []
        for home in models:
            order = self._admission.order_by_model[home]
            if not len(order):
                continue
            away = [m for m in models if m != home and not self._admission.order_by_model[m]]
            away = [m for m in away if self._has_other_cache(m, home, at_s)]
            if not away:
                continue
            held = [turns[turn_id] for turn_id in islice(order, PLACES_MAX)]
            movable = [(place, t) for place, t in enumerate(held) if may_move(t, programs[t.program_id])]
            away = self._roomy(away, [turn for _, turn in movable], programs, at_s)
            if not away:
                continue
            wait_s = self.waiting.line(home, len(order), at_s)(len(order) - 1).wait_s
            for place, turn in movable:
                program = programs[turn.program_id]
                gaps = ((m, self._gap(home, m, program, wait_s)) for m in away)
                found += [(gap, place, Move(turn, program, m)) for m, gap in gaps if gap is not None]
        return self._first_with_room(sorted(found, key=lambda entry: entry[:2]), at_s)

    def _has_other_cache(self, model_id: ModelId, home: ModelId, at_s: float) -> bool:
        """Whether a model has a cache that the home model does not use: moving inside a shared one frees nothing.

        Whoever moved would take the very room that the head of the line at home waits for.
        """
        members = self._admission.ledger.members
        shared = {member for backend_id in self._backends.usable(home, at_s) for member in members(backend_id)}
        return any(backend_id not in shared for backend_id in self._backends.usable(model_id, at_s))

    def _roomy(
        self, models: list[ModelId], turns: list[Turn], programs: Mapping[ProgramId, Program], at_s: float
    ) -> list[ModelId]:
        """Models on which the smallest of the turns would start: looking is cheaper than forecasting a line."""
        if not turns:
            return []
        least = min(turns, key=lambda turn: turn.needed_tokens)
        program = programs[least.program_id]
        return [m for m in models if self._admission.room_at(m, least, program, at_s) is not None]

    def _first_with_room(self, moves: Sequence[tuple[float, int, Move]], at_s: float) -> Move | None:
        """The first that would start at once; where one finds no room, none that is as large does."""
        refused_tokens: dict[ModelId, int] = {}
        for _, _, move in moves:
            tokens = move.turn.needed_tokens
            if tokens >= refused_tokens.get(move.model, tokens + 1):
                continue
            if self._admission.room_at(move.model, move.turn, move.program, at_s) is not None:
                return move
            refused_tokens[move.model] = tokens
        return None

    def _gap(self, home: ModelId, away: ModelId, program: Program, wait_s: float) -> float | None:
        """What success the move costs; None where staying is better."""
        stays, goes = program.estimates.get(home), program.estimates.get(away)
        if stays is None or goes is None or not self.score_of(away, goes, 0.0) > self.score_of(home, stays, wait_s):
            return None
        stays, goes = self.expected(home, stays), self.expected(away, goes)
        return stays - goes if self._is_open(away, stays, goes) else None

    # --- what diverts give up ---

    def note_routed(self, program: Program, home: ModelId) -> None:
        """The selector has sent a new program somewhere; it is bound to a model, there or elsewhere."""
        self.forgone.learn_routed(self.expected(home, program.estimates[home]))
        self.forgone.learn_diverted(self._given_up(program, home, program.model))
        program.n_routed = self.forgone.n_routed

    def note_lost(self, program: Program) -> None:
        """A program that has not started never will where the selector sent it: there is nothing to give up."""
        home = program.routed_model or program.model
        if program.n_routed and home in program.estimates:
            success = self.expected(home, program.estimates[home])
            self.forgone.take_back(success, self._given_up(program, home, program.model), program.n_routed)
            program.n_routed = 0

    def note_diverted(self, program: Program, away: ModelId) -> None:
        """A program is to run elsewhere, or back where the selector sent it."""
        if not program.n_routed:
            return
        home = program.routed_model or program.model
        before = self._given_up(program, home, program.model)
        self.forgone.learn_diverted(self._given_up(program, home, away), before)

    def _given_up(self, program: Program, home: ModelId | None, away: ModelId | None) -> float:
        """How much less success a program is expected to have on a model than where the selector sent it."""
        if home not in program.estimates or away not in program.estimates:
            return 0.0
        stays, goes = self.expected(home, program.estimates[home]), self.expected(away, program.estimates[away])
        return stays - goes

    def _is_open(self, away: ModelId, stays: float, goes: float) -> bool:
        """Whether anybody may be diverted there, however long the wait.

        Success there must outweigh what runs out of time there, for an engine's time that goes into programs which will
        be cut off is gone for all others. And what all diverts give up is bounded; it has to buy programs that end in
        time, so where a share of them does not, or has not been seen to, the bound is that much lower.
        """
        ends_ratio = self._admission.demand_by_model[away].finished_ratio
        divert = self._config.divert
        if divert.heeds_waste and goes < (1.0 - ends_ratio) * stays:
            return False
        most = divert.forgoes_max_ratio
        return most is None or self.forgone.allows(stays - goes, most * self._proven_ratio(away))

    def _proven_ratio(self, model_id: ModelId) -> float:
        """Share of programs that have been seen to end in time there; all, where nobody has to or nobody asks."""
        demand = self._admission.demand_by_model[model_id]
        has_budget = self._config.budget_s is not None or demand.n_overdue > 0
        return demand.proven_ratio if has_budget and self._config.divert.counts_overdue else 1.0


def may_move(turn: Turn, program: Program) -> bool:
    """Whether a held turn's program has nothing anywhere yet, and nobody has named its model."""
    return (
        not turn.is_side
        and not program.is_pinned
        and program.n_turns == 0
        and program.admitted_at_s is None
        and not program.tried_models
        and not program.attempts
        and len(program.open_turns) == 1
    )


def _greedy(choice: Choice) -> int | None:
    """What the policy holds for best; None where it has no scores and every choice of it is as good as another."""
    if not choice.scores:
        return None
    top = max(choice.scores)
    if choice.propensities is None:
        return choice.scores.index(top)
    return max(range(len(choice.scores)), key=lambda i: (choice.propensities[i], choice.scores[i]))  # type: ignore[index]


def _kept_share(index: int, greedy: int | None, propensities: tuple[float, ...] | None) -> float:
    """Share of a choice's probability that is exploration, and is not overruled."""
    if greedy is None:
        return 0.0
    if index != greedy:
        return 1.0
    if propensities is None or not propensities[index] > 0.0:
        return 0.0
    return min(propensities) / propensities[index]
