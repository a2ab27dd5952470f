"""A backend of the virtual world: one engine, its health, and the attempts that are on it."""

from collections.abc import Callable

import msgspec

from loadwise.kernel.errors import Error, LawBroken, Overloaded
from loadwise.kernel.pool import BackendHealth, BackendSpec
from loadwise.kernel.work import AttemptOutcome, Usage

from .engine import Engine, EngineRequest, Output


class Attempt:
    """One dispatch as the host sees it."""

    __slots__ = ("backend_id", "cached_tokens", "first_byte_at_s", "model", "n", "n_out", "request", "turn_id")

    def __init__(self, turn_id: int, n: int, backend_id: str, model: str, request: EngineRequest) -> None:
        self.turn_id = turn_id
        self.n = n
        self.backend_id = backend_id
        self.model = model
        self.request = request
        self.first_byte_at_s: float | None = None
        self.n_out = 0
        self.cached_tokens = 0

    @property
    def usage(self) -> Usage:
        """What was used so far; exact only once the engine has said its last token."""
        if self.first_byte_at_s is None:
            return Usage(is_exact=False)
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=self.n_out,
            cached_tokens=self.cached_tokens,
            is_exact=self.n_out >= self.request.output_tokens,
        )


class AttemptOver(msgspec.Struct, frozen=True):
    """How an attempt ended, on its way to the machine."""

    attempt: Attempt
    outcome: AttemptOutcome
    status: int = 0
    detail: str = ""
    retry_after_s: float | None = None
    """What a refusal asks for, as its `Retry-After` would."""


class VirtualBackend:
    """Drives one engine in the world's time.

    The world gives `wake(after_s)`, which must call `advance` so many seconds from now, replacing an earlier wake.
    Whatever ends is reported through `over`; the world makes events of it.
    """

    def __init__(
        self,
        spec: BackendSpec,
        open_engine: Callable[[], Engine],
        wake: Callable[[float | None], None],
        over: Callable[[AttemptOver], None],
    ) -> None:
        self.spec = spec
        self.attempts: dict[int, Attempt] = {}
        self.seen_health = BackendHealth.UP
        self._open_engine = open_engine
        self._engine = open_engine()
        self._wake = wake
        self._over = over
        self._is_down = False
        self._is_hung = False
        self._heard_tokens = 0
        """Said by the engine that runs now."""

    @property
    def is_answering(self) -> bool:
        """Whether a probe would get its metrics."""
        return not (self._is_down or self._is_hung)

    def start(self, attempt: Attempt, now_s: float) -> None:
        """Send an attempt to the engine."""
        if self._is_down:
            self._over(AttemptOver(attempt, AttemptOutcome.REFUSED, detail="connection refused"))
            return
        self.advance(now_s)
        self.attempts[attempt.request.request_id] = attempt
        try:
            self._engine.submit(attempt.request)
        except Error as error:
            retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
            self._end(attempt.request.request_id, AttemptOutcome.STATUS, error.status, error.message, retry_after_s)
            return
        self.advance(now_s)

    def take_back(self, request_id: int, outcome: AttemptOutcome, now_s: float, detail: str = "") -> bool:
        """Close an attempt's connection, so that the engine stops. False where it is over already."""
        self.advance(now_s)
        if request_id not in self.attempts:
            return False
        self._engine.cancel(request_id)
        self._end(request_id, outcome, detail=detail)
        self.advance(now_s)
        return True

    def advance(self, now_s: float) -> None:
        """Bring the engine to this instant."""
        if self._is_down or self._is_hung:
            return
        step = self._engine.step(now_s)
        for output in step.outputs:
            self._hear(output, now_s)
        self._wake(step.seconds if step.seconds > 0 else None)

    def signals(self, now_s: float) -> dict[str, float]:
        """What a probe reads."""
        return self._engine.signals(now_s)

    def crash(self) -> None:
        """The process dies: connections break, memory is gone."""
        self._is_down = True
        self._wake(None)
        self._engine = self._open_engine()
        self._heard_tokens = 0
        for request_id in list(self.attempts):
            self._end(request_id, AttemptOutcome.BROKEN, detail="the engine crashed")

    def hang(self) -> None:
        """The process stops answering without closing anything."""
        self._is_hung = True
        self._wake(None)

    def slow(self, speed_ratio: float, now_s: float) -> None:
        """Every engine step from now on takes longer."""
        self.advance(now_s)
        self._engine.set_speed(speed_ratio)
        self.advance(now_s)

    def recover(self, now_s: float) -> None:
        """Up, answering and at full speed."""
        self._is_down = self._is_hung = False
        self._engine.set_speed(1.0)
        self.advance(now_s)

    def check(self, now_s: float) -> None:
        """The engine's own laws, and that every token that it counts was heard, once."""
        self._engine.check()
        said_tokens = self._engine.signals(now_s)["generation_tokens"]
        if said_tokens != self._heard_tokens:
            raise LawBroken(
                "L1", f"engine of {self.spec.name!r} said {said_tokens:.0f} tokens, {self._heard_tokens} were heard"
            )

    def _hear(self, output: Output, now_s: float) -> None:
        self._heard_tokens += output.n_new_tokens
        attempt = self.attempts.get(output.request_id)
        if attempt is None:
            return
        attempt.n_out += output.n_new_tokens
        attempt.cached_tokens = max(attempt.cached_tokens, output.cached_tokens)
        if output.is_first:
            attempt.first_byte_at_s = now_s
        if output.is_finished:
            self._end(output.request_id, AttemptOutcome.COMPLETED, 200)

    def _end(
        self,
        request_id: int,
        outcome: AttemptOutcome,
        status: int = 0,
        detail: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self._over(AttemptOver(self.attempts.pop(request_id), outcome, status, detail, retry_after_s))
