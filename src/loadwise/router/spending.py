"""What turns may cost: a hard budget of dollars for every rolling hour, kept turn by turn.

A turn is promised the most that its attempt may cost before it is dispatched or held, and before a program is bound the
models are left out whose promise does not fit. When the attempt ends the promise becomes what it really cost. Nothing
waits for money: what does not fit is refused with 429 and told when to come back.

The most that an attempt may cost is its prompt at the full input price (as estimated, or as long as the program's
context was last counted, whichever is more), and as many output tokens as the client permits, or `budget_output_tokens`
where it names no limit, for each answer asked for. An engine that counts more than that overshoots its promise: the
excess stays in the window, and others are refused until it has left. An attempt that ended without the engine's count
is taken to have cost all of its promise, unless it never began.

Models that cost nothing are promised nothing and never refused.
"""

from collections.abc import Sequence

import msgspec

from loadwise.kernel import events as e
from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import ModelId
from loadwise.kernel.pool import price_usd
from loadwise.kernel.work import AttemptOutcome
from loadwise.policy.purse import USD_MAX, WINDOW_S, Purse, PurseState

from .backends import Backends
from .config import RouterConfig
from .failure import RETRY_AFTER_S, UNREACHABLE, Failure, over_dollar_budget
from .program import CalledOff, Program, Turn, clamped_tokens


class SpendingState(Fact, frozen=True, kw_only=True):
    """A dump of `Spending`."""

    purse: PurseState
    n_promises: int


class Bill(msgspec.Struct, frozen=True):
    """What one attempt has used and cost, as its program is charged."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    usd: float
    is_counted: bool
    """Whether the engine itself has counted, believably."""
    is_misread: bool
    """Whether it has said what cannot be true."""


class Spending:
    """Promises money to turns; does nothing where no budget is configured."""

    def __init__(self, config: RouterConfig, backends: Backends) -> None:
        self._backends = backends
        self._output_tokens = config.budget_output_tokens
        limit_usd = config.budget_usd_per_h
        self.purse = None if limit_usd is None else Purse(limit_usd)
        self._n_promises = 0

    def cost_max_usd(self, model: ModelId, turn: Turn, program: Program) -> float:
        """The most that an attempt of the turn may cost on a model."""
        prompt_tokens = turn.prompt_tokens if turn.is_side else max(turn.prompt_tokens, program.context_tokens)
        return self._usd_max(model, prompt_tokens, turn.max_output_tokens, turn.n_answers)

    def _usd_max(self, model: ModelId, prompt_tokens: int, output_tokens: int | None, n_answers: int = 1) -> float:
        limit_tokens = self._backends.tokens_max(model, None)
        answer_tokens = self._output_tokens if output_tokens is None else output_tokens
        answers_tokens = clamped_tokens(n_answers * min(answer_tokens, limit_tokens))
        price, prompt_tokens = self._backends.price(model), min(prompt_tokens, limit_tokens)
        # A cache's price is the lower one as a rule, and not by law.
        usd = max(price_usd(price, prompt_tokens, answers_tokens, cached) for cached in (0, prompt_tokens))
        return min(usd, USD_MAX)

    def affordable(self, models: Sequence[ModelId], program: Program, turn: Turn | None, at_s: float) -> list[ModelId]:
        """Those of `models` on which the turn may be dispatched now; without a turn, one like the program's last."""
        if self.purse is None:
            return list(models)
        usd_max: dict[str, float] = {
            model: self._usd_max(model, program.context_tokens, None)
            if turn is None
            else self.cost_max_usd(model, turn, program)
            for model in models
        }
        fitting = set(self.purse.affordable(usd_max, at_s))
        return [model for model in models if usd_max[model] == 0.0 or model in fitting]

    def cover(self, turn: Turn, program: Program, at_s: float) -> Failure | None:
        """Promise the turn what it may cost on its model, in place of what it was promised before, or say why not."""
        if self.purse is None:
            return None
        self.settle(turn, 0.0, at_s)
        assert turn.model is not None
        usd_max = self.cost_max_usd(turn.model, turn, program)
        if usd_max == 0.0:
            return None
        promise = str(self._n_promises + 1)
        if not self.purse.promise(promise, usd_max, at_s):
            return self.refusal(usd_max, at_s)
        self._n_promises += 1
        turn.promise = promise
        return None

    def refusal(self, usd_max: float, at_s: float) -> Failure:
        """What a client hears whose turn does not fit."""
        assert self.purse is not None
        limit_usd, left_usd = self.purse.limit_usd, max(self.purse.left_usd(at_s), 0.0)
        if usd_max > limit_usd:
            return over_dollar_budget(usd_max, limit_usd, left_usd, WINDOW_S)
        frees_after_s = self.purse.frees_after_s(usd_max, at_s)
        # Where open turns hold what is missing, it comes free when they end, which nobody knows.
        return over_dollar_budget(usd_max, limit_usd, left_usd, frees_after_s or RETRY_AFTER_S)

    def settle(self, owner: Turn | CalledOff, usd: float | None, at_s: float) -> None:
        """What was promised is spent, or as much of it as `usd`; None: all of it."""
        promise, owner.promise = owner.promise, ""
        if self.purse is None:
            return
        known = None if usd is None else min(usd, USD_MAX)
        if promise in self.purse.open:
            self.purse.settle(promise, known, at_s)
        elif known:  # it was free, or there was no budget, when it began
            self.purse.spend(known, at_s)

    def settle_attempt(self, owner: Turn | CalledOff, event: e.AttemptEnded, bill: Bill) -> None:
        """An attempt has ended; see the module's word on those that nobody counted."""
        is_complete = event.outcome is AttemptOutcome.COMPLETED
        if bill.is_counted and (is_complete or bill.prompt_tokens):
            usd: float | None = bill.usd
        elif is_complete and not event.usage.is_exact:
            usd = bill.usd
        elif event.outcome in UNREACHABLE or event.outcome is AttemptOutcome.STATUS:
            usd = 0.0
        else:
            usd = None
        self.settle(owner, usd, event.at_s)

    def dump(self) -> SpendingState | None:
        """State as plain values."""
        if self.purse is None:
            return None
        return SpendingState(purse=self.purse.dump(), n_promises=self._n_promises)

    def load(self, state: SpendingState | None) -> None:
        """Continue from a dump; another budget is kept from now on, with what was spent under the one before."""
        if self.purse is not None and state is not None:
            self.purse.load(state.purse)
            self._n_promises = state.n_promises
