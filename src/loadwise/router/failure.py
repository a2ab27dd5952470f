"""What a failed attempt means: may it be tried again, is the backend to blame, what does the client hear."""

from loadwise.kernel.events import AttemptEnded
from loadwise.kernel.fact import Fact
from loadwise.kernel.work import AttemptOutcome

_O = AttemptOutcome

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
UNREACHABLE = frozenset({_O.REFUSED, _O.CONNECT_TIMEOUT})
UNRESPONSIVE = frozenset({_O.FIRST_BYTE_TIMEOUT, _O.BROKEN})
"""Bad when it happens once, a reason to go elsewhere when it happens in a row."""
PATIENCE_DEFAULT_S = 1.0
PATIENCE_MAX_S = 60.0


class Failure(Fact, frozen=True, kw_only=True):
    """The client's answer if no retry helps."""

    status: int
    code: str
    message: str
    is_upstream_answer: bool = False
    retry_after_s: float | None = None


def may_retry(event: AttemptEnded) -> bool:
    """A retry is invisible only before the first byte, and useful only where another try may go otherwise."""
    if event.first_byte_at_s is not None or event.outcome is _O.CANCELLED:
        return False
    return event.outcome is not _O.STATUS or event.status in RETRYABLE_STATUSES


def patience_s(event: AttemptEnded) -> float | None:
    """How long an overloaded backend is to be left alone, or None."""
    if event.outcome is not _O.STATUS or event.status not in (429, 503):
        return None
    asked_s = PATIENCE_DEFAULT_S if event.retry_after_s is None else event.retry_after_s
    return min(max(asked_s, 0.0), PATIENCE_MAX_S)


def explain(event: AttemptEnded, backend_id: str) -> Failure:
    """Say what went wrong in words a client can act on."""
    detail = f": {event.detail}" if event.detail else ""
    match event.outcome:
        case _O.STATUS:
            return Failure(
                status=event.status,
                code="upstream_status",
                message=f"backend {backend_id!r} answered {event.status}{detail}",
                is_upstream_answer=True,
                retry_after_s=event.retry_after_s,
            )
        case _O.REFUSED | _O.CONNECT_TIMEOUT:
            message = f"backend {backend_id!r} cannot be reached{detail}"
            return Failure(status=502, code="upstream_unreachable", message=message)
        case _O.FIRST_BYTE_TIMEOUT | _O.IDLE_TIMEOUT:
            message = f"backend {backend_id!r} did not answer in time{detail}"
            return Failure(status=504, code="upstream_timeout", message=message)
        case _:
            message = f"backend {backend_id!r} broke off its answer{detail}"
            return Failure(status=502, code="upstream_broken", message=message)
