"""What a failed attempt means: may it be tried again, is the backend to blame, what does the client hear."""

import math
from collections.abc import Sequence

from loadwise.kernel import commands as c
from loadwise.kernel.events import AttemptEnded
from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import AttemptOutcome, TurnOutcome

_O = AttemptOutcome

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
UNREACHABLE = frozenset({_O.REFUSED, _O.CONNECT_TIMEOUT})
UNRESPONSIVE = frozenset({_O.FIRST_BYTE_TIMEOUT, _O.BROKEN})
"""Bad when it happens once, a reason to go elsewhere when it happens in a row."""
REFUSING_STATUSES = frozenset({401, 403})
"""The backend does not know us: no client can cause that, for the key is ours."""
UNSUPPORTED_STATUSES = frozenset({501, 505})
"""An honest answer to a request that it does not know."""
PATIENCE_DEFAULT_S = 1.0
PATIENCE_MAX_S = 60.0
RETRY_AFTER_S = 1.0
"""What an overloaded router asks of its clients."""


class Failure(Fact, frozen=True, kw_only=True):
    """The client's answer if no retry helps."""

    status: int
    code: str
    message: str
    is_upstream_answer: bool = False
    retry_after_s: float | None = None

    def end_turn(self, turn_id: TurnId, outcome: TurnOutcome) -> c.EndTurn:
        """The command that tells the client."""
        return c.EndTurn(
            turn_id=turn_id,
            outcome=outcome,
            status=self.status,
            code=self.code,
            message=self.message,
            retry_after_s=self.retry_after_s,
            is_upstream_answer=self.is_upstream_answer,
        )


def overloaded(code: str, message: str) -> Failure:
    """We have too much to do; the client may come back."""
    return Failure(status=503, code=code, message=message, retry_after_s=RETRY_AFTER_S)


def held_too_long(hold_max_s: float) -> Failure:
    """The turn has waited as long as it may."""
    return overloaded("held_too_long", f"held for {hold_max_s:g} s, which is the limit")


def rate_limited(hold_max_s: float, frees_after_s: float) -> Failure:
    """The turn has waited as long as it may for a rate window of ours: the pool is not slow, it is rationed."""
    text = f"held for {hold_max_s:g} s, which is the limit: all requests per minute of its backends are spent"
    return Failure(status=429, code="rate_limited", message=text, retry_after_s=frees_after_s)


def nobody_usable(what: str) -> Failure:
    """Every backend that could answer is down, draining, or asked to be left alone."""
    return overloaded("no_backend_available", f"no backend of {what} can be reached now")


def unknown_model(model: str, known: Sequence[str]) -> Failure:
    """The client asked for a model that the pool does not have."""
    text = f"the model {model!r} is not in the pool; known: {', '.join(known)}"
    return Failure(status=404, code="model_not_found", message=text)


def model_removed(program_id: ProgramId, model: str) -> Failure:
    """The model that a program is bound to has left the pool: waiting does not help, another program does."""
    text = f"program {program_id!r} is bound to the model {model!r}, which no backend of the pool serves any more"
    return Failure(status=409, code="model_removed", message=text)


def program_finished(program_id: ProgramId, how: str) -> Failure:
    """The program takes no more turns."""
    return Failure(status=409, code="program_finished", message=f"program {program_id!r} has ended ({how})")


def budget_exceeded(program_id: ProgramId) -> Failure:
    """The program has run as long as it may."""
    text = f"program {program_id!r} has used up its time budget"
    return Failure(status=429, code="budget_exceeded", message=text)


def over_dollar_budget(usd_max: float, limit_usd: float, left_usd: float, retry_after_s: float) -> Failure:
    """The turn may cost more than is left of the hour's money; it did not wait for it."""
    text = f"this turn may cost {usd_max:.6g} USD; of the budget of {limit_usd:g} USD per rolling hour"
    text = f"{text} {left_usd:.6g} USD are left (router.budget_usd_per_h)"
    if usd_max > limit_usd:
        text = f"{text}: it never fits; a smaller max_tokens may"
    return Failure(status=429, code="dollar_budget_exceeded", message=text, retry_after_s=retry_after_s)


def may_retry(event: AttemptEnded) -> bool:
    """A retry is invisible only before the first byte, and useful only where another try may go otherwise."""
    if event.first_byte_at_s is not None or event.outcome is _O.CANCELLED:
        return False
    return event.outcome is not _O.STATUS or event.status in RETRYABLE_STATUSES


def is_fault(event: AttemptEnded) -> bool:
    """Whether a failed attempt speaks against the backend: the same call would fare no better by being another's."""
    if event.outcome in UNREACHABLE:
        return True
    if event.outcome is not _O.STATUS:
        return event.outcome in UNRESPONSIVE and event.first_byte_at_s is None
    if 400 <= event.status < 500:
        return event.status in REFUSING_STATUSES
    return event.status not in UNSUPPORTED_STATUSES and patience_s(event) is None


def patience_s(event: AttemptEnded) -> float | None:
    """How long an overloaded backend is to be left alone, or None."""
    if event.outcome is not _O.STATUS or event.status not in (429, 503):
        return None
    asked_s = _asked_s(event)
    return PATIENCE_DEFAULT_S if asked_s is None else min(asked_s, PATIENCE_MAX_S)


def _asked_s(event: AttemptEnded) -> float | None:
    """The engine's Retry-After, where it makes sense."""
    asked_s = event.retry_after_s
    return asked_s if asked_s is not None and math.isfinite(asked_s) and asked_s >= 0.0 else None


def explain(event: AttemptEnded, backend_id: str) -> Failure:
    """Say what went wrong in words a client can act on."""
    detail = f": {event.detail}" if event.detail else ""
    match event.outcome:
        case _O.STATUS if 400 <= event.status <= 599:
            return Failure(
                status=event.status,
                code="upstream_status",
                message=f"backend {backend_id!r} answered {event.status}{detail}",
                is_upstream_answer=True,
                retry_after_s=_asked_s(event),
            )
        case _O.STATUS:
            message = f"backend {backend_id!r} answered {event.status}, which is no answer to a model call{detail}"
            return Failure(status=502, code="upstream_broken", message=message)
        case _O.REFUSED | _O.CONNECT_TIMEOUT:
            message = f"backend {backend_id!r} cannot be reached{detail}"
            return Failure(status=502, code="upstream_unreachable", message=message)
        case _O.FIRST_BYTE_TIMEOUT | _O.IDLE_TIMEOUT:
            message = f"backend {backend_id!r} did not answer in time{detail}"
            return Failure(status=504, code="upstream_timeout", message=message)
        case _:
            message = f"backend {backend_id!r} broke off its answer{detail}"
            return Failure(status=502, code="upstream_broken", message=message)
