"""Carries one turn: the client's exchange on one side, attempts on engines on the other.

A relay decides nothing. It reports what happened to its attempt as one `AttemptEnded` and does what the router says:
dispatch (again), cancel, or end with an error. A whole answer reaches the client in one write when it is complete, so
an engine that breaks in the middle of one can still be replaced; a stream reaches the client event by event.
"""

import asyncio
import math
from typing import TYPE_CHECKING

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import AttemptOutcome, Usage
from loadwise.wire.attempt import Attempt
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import EVENT_STREAM, JSON_TYPE

from .answers import error_body, retry_after
from .events import EventStream
from .identity import Conversation
from .intake import answer_text
from .openai import BYTES_PER_TOKEN, UNREADABLE, ModelRequest
from .readers.api import ApiMeter
from .replies import StreamedReplies, first_text, whole_replies
from .usage import read_usage

if TYPE_CHECKING:
    from .turns import Turns

_OUTCOME_BY_KIND = {
    "refused": AttemptOutcome.REFUSED,
    "connect_timeout": AttemptOutcome.CONNECT_TIMEOUT,
    "first_byte_timeout": AttemptOutcome.FIRST_BYTE_TIMEOUT,
    "idle_timeout": AttemptOutcome.IDLE_TIMEOUT,
    "reset": AttemptOutcome.BROKEN,
    "truncated": AttemptOutcome.BROKEN,
    "malformed": AttemptOutcome.BROKEN,
}
BUSY_STATUS = 429
"""Our own connections are all in use: told to the router as an answer that asks for patience and blames nobody, for it
has no word of its own for it; the client hears 503."""
ERROR_ANSWER_MAX_BYTES = 1024 * 1024
_PASSED = (b"x-request-id", b"x-ratelimit-", b"openai-")
EVENT_BYTES = 200
"""Bytes of a usual one-token event, for estimates where the engine sends no usage."""


class Relay:
    """One turn between client and engines; also the sink of its attempts.

    `turn_id` is 0 until the turn has arrived at the stack.
    """

    __slots__ = (
        "_answer",
        "_answer_headers",
        "_answer_status",
        "_attempt",
        "_events",
        "_exchange",
        "_first_byte_at_s",
        "_head",
        "_is_busy",
        "_is_over",
        "_keep_alive",
        "_meter",
        "_n_answer_bytes",
        "_number",
        "_path",
        "_replies",
        "_request",
        "_sent_at_s",
        "_turns",
        "conversation",
        "program_id",
        "received_at_s",
        "turn_id",
    )

    def __init__(
        self,
        turns: "Turns",
        exchange: Exchange,
        request: ModelRequest,
        path: bytes,
        *,
        turn_id: TurnId,
        program_id: ProgramId,
        conversation: Conversation | None,
        received_at_s: float,
    ) -> None:
        self._turns = turns
        self._exchange = exchange
        self._request = request
        self._path = path
        self.turn_id = turn_id
        self.program_id = program_id
        self.conversation = conversation
        """Where the program is known by its messages only."""
        self.received_at_s = received_at_s
        self._attempt: Attempt | None = None
        self._number = 0
        self._head = b""
        self._is_over = False
        """The client has its answer; what the engine still says is nobody's."""
        self._first_byte_at_s: float | None = None
        self._meter: ApiMeter | None = None
        """Where the attempt in flight is one at a paid API."""
        self._sent_at_s = 0.0
        self._keep_alive: asyncio.TimerHandle | None = None
        """Due while a streaming client waits for a place."""
        self._clear()
        exchange.on_disconnect = self._on_client_left
        exchange.on_pause = self._on_client_slow
        exchange.on_resume = self._on_client_ready

    def _clear(self) -> None:
        self._answer: list[bytes] = []
        self._n_answer_bytes = 0
        self._answer_status = 0
        self._is_busy = False
        self._answer_headers: dict[bytes, bytes] = {}
        self._events: EventStream | None = None
        self._replies: StreamedReplies | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the client still waits for an answer."""
        return self._exchange.is_open

    def await_place(self) -> None:
        """A streaming client that is held hears of it now and then, so that nothing between us gives up on it."""
        is_waiting = self._attempt is None and self.is_awaited and not self._is_over
        if self._request.is_stream and is_waiting and self._keep_alive is None:
            loop, seconds = asyncio.get_running_loop(), self._turns.keep_alive_s
            self._keep_alive = loop.call_later(seconds, self._comment)

    def _comment(self) -> None:
        """Say that we are there: a comment, which every reader of event streams passes over."""
        exchange = self._exchange
        if self._attempt is None and exchange.is_open and not self._is_over:
            if not exchange.is_started:
                exchange.start(200, EVENT_STREAM + self._own_head())
            exchange.write(b": waiting for a place\n\n")
        self._stop_commenting()
        if exchange.is_open:
            self.await_place()

    def _stop_commenting(self) -> None:
        handle, self._keep_alive = self._keep_alive, None
        if handle is not None:
            handle.cancel()

    # --- what the router says -------------------------------------------------------------------------------------

    def dispatch(self, command: c.Dispatch) -> None:
        """Send the request to the backend that was chosen."""
        turns = self._turns
        if command.attempt > 1:
            self._clear()
        if self._keep_alive is not None:
            self._stop_commenting()
        self._number = command.attempt
        link = turns.links[command.backend_id]
        self._head = b"x-loadwise-program: %b\r\n%bx-loadwise-decision: %d\r\nx-loadwise-wait-ms: %d\r\n" % (
            turns.header_text(command.program_id),
            link.head,
            command.decision_id,
            command.wait_s * 1000.0,
        )
        priority = link.engine_priority(command.priority) if command.priority else None
        body = self._request.encode(link.served_model, priority)
        if self._meter is not None:
            self._stop_meter()
        if link.meter is not None:
            self._meter, self._sent_at_s = link.meter, turns.host.now_s()
            link.meter.sent(self._sent_at_s)
        self._attempt = link.upstream.send(b"POST", self._path, link.request_headers, body, self)
        if command.attempt == 1:
            turns.note_overhead(turns.host.now_s() - self.received_at_s - command.wait_s)

    def cancel(self) -> None:
        """Take the attempt in flight back, and say so: what it was promised is settled by its end."""
        is_running = self._attempt is not None and not self._is_over
        self._hang_up()
        if is_running:
            self._fail(AttemptOutcome.CANCELLED, "taken back")

    def _hang_up(self) -> None:
        """Close the engine's connection, so that it stops."""
        attempt, self._attempt = self._attempt, None
        self._stop_meter()
        if attempt is not None:
            attempt.cancel()

    def _stop_meter(self, *, is_answered: bool = False) -> None:
        """The attempt counts as in flight no longer."""
        meter, self._meter = self._meter, None
        if meter is not None and is_answered:
            meter.answered(self._sent_at_s, self._turns.host.now_s(), self._answer_headers)
        elif meter is not None:
            meter.ended()

    def end(self, command: c.EndTurn) -> None:
        """Tell the client that there is no answer, unless it has heard already."""
        self.cancel()
        self._stop_commenting()
        exchange = self._exchange
        self._turns.settle(self, None)
        if not exchange.is_open:
            return
        if exchange.is_started:
            self._break_stream(command.message, command.code)
            return
        if command.is_upstream_answer and self._answer_status:
            self._pass_error_on(command)
            return
        headers = JSON_TYPE + self._own_head()
        if command.is_upstream_answer and self._is_busy:
            text = "all connections of the gateway to this backend are in use (gateway.upstream_connections_max)"
            exchange.respond(503, headers + retry_after(1.0), error_body(503, text, code="connections_busy"))
            return
        if command.retry_after_s is not None:
            headers += retry_after(command.retry_after_s)
        exchange.respond(command.status, headers, error_body(command.status, command.message, code=command.code))

    def _own_head(self) -> bytes:
        if self._head:
            return self._head
        return b"x-loadwise-program: %b\r\n" % self._turns.header_text(self.program_id)

    def _pass_error_on(self, command: c.EndTurn) -> None:
        """The engine's own error, as it is where it has OpenAI's shape, in that shape where it has not."""
        said = b"".join(self._answer)
        body = _openai_error(said)
        if body is None:
            text = said[:2000].decode("utf-8", "replace")
            body = error_body(command.status, text or command.message, code=command.code)
        headers = JSON_TYPE + self._head
        if command.retry_after_s is not None:
            headers += retry_after(command.retry_after_s)
        self._exchange.respond(command.status, headers, body)

    # --- what the engine says -------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The engine's status and headers."""
        self._answer_status = status
        self._answer_headers = headers
        if self._meter is not None:
            self._meter.heard(self._turns.host.now_s(), headers)
        if status < 400 and headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._events = EventStream(drops_usage=self._request.adds_usage)
            if self.conversation is not None or self._is_kept():
                self._replies = StreamedReplies()

    def on_body(self, data: bytes) -> None:
        """A piece of the engine's answer."""
        if self._events is not None:
            self._relay_events(self._events, data)
            return
        self._n_answer_bytes += len(data)
        limit = self._turns.answer_max_bytes if self._answer_status < 400 else ERROR_ANSWER_MAX_BYTES
        if self._n_answer_bytes <= limit:
            self._answer.append(data)
        elif self._answer_status < 400:
            self._hang_up()
            self._fail(AttemptOutcome.BROKEN, f"the answer is longer than {limit} bytes, which is the limit")

    def _relay_events(self, events: EventStream, data: bytes) -> None:
        if self._is_over:
            self._hang_up()  # an engine that goes on after the end of its answer
            return
        if self._replies is not None:
            self._replies.feed(data)
        data = events.feed(data)
        if data:
            self._pass_on(data)
        if events.is_done:
            # Not only when the engine ends its answer: clients hang up as soon as they have read [DONE].
            self._end_stream(events)

    def _pass_on(self, data: bytes) -> None:
        exchange = self._exchange
        if self._first_byte_at_s is None:
            self._first_byte_at_s = self._turns.host.now_s()
        if not exchange.is_started:
            exchange.start(self._answer_status, EVENT_STREAM + self._head + self._passed_headers())
        exchange.write(data)

    def on_end(self) -> None:
        """The engine's answer is complete."""
        attempt, self._attempt = self._attempt, None
        if self._is_over or attempt is None:
            return
        if self._answer_status >= 400:
            self._fail(AttemptOutcome.STATUS, "")
        elif self._events is not None:
            self._end_unfinished_stream(self._events)
        else:
            self._end_whole()

    def _end_stream(self, events: EventStream) -> None:
        if not self._exchange.is_open:
            return  # dropped for reading too slowly, a moment ago: the turn is abandoned
        self._is_over = True
        if self._attempt is not None:
            self._attempt.resume_reading()  # nobody else would
        self._exchange.end()
        usage = events.usage or self._estimate(events.n_bytes // EVENT_BYTES)
        replies = [] if self._replies is None else self._replies.replies()
        if self._is_kept():
            self._keep(first_text(replies))
        self._complete(usage, replies)

    def _end_unfinished_stream(self, events: EventStream) -> None:
        last = events.finish()
        if last:
            self._pass_on(last)
            self._end_stream(events)
            return
        what = "the stream ended without [DONE]"
        self._break_stream(what, "upstream_broken")
        self._fail(AttemptOutcome.BROKEN, what)

    def _end_whole(self) -> None:
        body = self._answer[0] if len(self._answer) == 1 else b"".join(self._answer)
        try:
            usage = read_usage(body)
        except ValueError as error:
            self._fail(AttemptOutcome.BROKEN, f"the answer is not JSON: {error}")
            return
        headers = self._answer_headers
        if self._exchange.is_started:  # a stream was asked for, and begun while the client was held
            self._break_stream("the engine answered without a stream", "upstream_broken")
            self._fail(AttemptOutcome.BROKEN, "the answer is no stream")
            return
        kind = headers.get(b"content-type", b"application/json")
        self._first_byte_at_s = self._turns.host.now_s()
        head = b"content-type: %b\r\n%b%b" % (kind, self._head, self._passed_headers())
        self._exchange.respond(self._answer_status, head, body)
        replies = [] if self.conversation is None else whole_replies(body)
        if self._is_kept():
            self._keep(answer_text(body))
        self._complete(usage or self._estimate(len(body) // BYTES_PER_TOKEN), replies)

    def on_error(self, kind: str, detail: str) -> None:
        """The engine's answer will not be complete."""
        self._attempt = None
        if self._is_over:
            return
        if kind == "busy":
            self._is_busy = True
            self._fail(AttemptOutcome.STATUS, detail, status=BUSY_STATUS, retry_after_s=0.0)
            return
        self._break_stream(f"the engine broke off its answer ({kind}: {detail})", "upstream_broken")
        self._fail(_OUTCOME_BY_KIND.get(kind, AttemptOutcome.BROKEN), detail)

    def _is_kept(self) -> bool:
        """Whether a verifier will need the text of the answer."""
        judging = self._turns.judging
        return judging is not None and judging.is_kept(self.program_id)

    def _keep(self, answer: str | None) -> None:
        judging = self._turns.judging
        assert judging is not None
        judging.intake.note_answer(self.program_id, answer)

    def _passed_headers(self) -> bytes:
        """Headers of the engine that a client may care for."""
        lines = b""
        for name, value in self._answer_headers.items():
            if name.startswith(_PASSED):
                lines += b"%b: %b\r\n" % (name, value)
        return lines

    def _break_stream(self, message: str, code: str) -> None:
        """End a stream that has begun: in band, well formed, without [DONE]."""
        exchange = self._exchange
        if exchange.is_started:
            start = b"\n\n" if self._events is not None and self._events.is_torn else b""
            exchange.write(b"%bdata: %b\n\n" % (start, error_body(502, message, code=code)))
            if exchange.is_open:  # else it was dropped for reading too slowly
                exchange.end()

    def _estimate(self, completion_tokens: int) -> Usage:
        prompt_tokens = self._request.prompt_tokens
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, is_exact=False)

    def _complete(self, usage: Usage, replies: list[object]) -> None:
        turns = self._turns
        host = turns.host
        if self._meter is not None:
            self._stop_meter(is_answered=True)
        if turns.judging is not None:
            turns.judging.forget_unrun(self.program_id)
        if self.conversation is not None:
            turns.settle(self, replies)
        host.relay_by_turn.pop(self.turn_id, None)
        host.post(
            e.AttemptEnded(
                at_s=host.now_s(),
                turn_id=self.turn_id,
                attempt=self._number,
                outcome=AttemptOutcome.COMPLETED,
                usage=usage,
                status=self._answer_status,
                first_byte_at_s=self._first_byte_at_s,
            )
        )

    def _fail(
        self, outcome: AttemptOutcome, detail: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        turns = self._turns
        self._stop_meter()
        usage = Usage()
        if self._events is not None:
            usage = self._events.usage or self._estimate(self._events.n_bytes // EVENT_BYTES)
        if outcome is AttemptOutcome.STATUS and status is None:
            retry_after_s = _retry_after_s(self._answer_headers)
        turns.host.post(
            e.AttemptEnded(
                at_s=turns.host.now_s(),
                turn_id=self.turn_id,
                attempt=self._number,
                outcome=outcome,
                usage=usage,
                status=self._answer_status if status is None else status,
                first_byte_at_s=self._first_byte_at_s,
                detail=detail[:500],
                retry_after_s=retry_after_s,
            )
        )

    # --- what the client does -------------------------------------------------------------------------------------

    def _on_client_left(self) -> None:
        self._stop_commenting()
        turns = self._turns
        turns.settle(self, None)
        if self.turn_id:
            turns.host.post(e.TurnAbandoned(at_s=turns.host.now_s(), turn_id=self.turn_id))
            turns.host.relay_by_turn.pop(self.turn_id, None)
        self.cancel()

    def _on_client_slow(self) -> None:
        if self._attempt is not None:
            self._attempt.pause_reading()

    def _on_client_ready(self) -> None:
        if self._attempt is not None:
            self._attempt.resume_reading()


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")


def _openai_error(body: bytes) -> bytes | None:
    """The engine's error with every field that clients look for, or None where it has another shape."""
    try:
        fields = _decode_object(body)
        error = _decode_object(fields["error"])
        msgspec.json.decode(error["message"], type=str)
    except (*UNREADABLE, KeyError):
        return None
    missing = {name: _NULL for name in ("param", "code", "type") if name not in error}
    return _encode({**fields, "error": {**error, **missing}}) if missing else body


RETRY_AFTER_MAX_S = 86400.0


def _retry_after_s(headers: dict[bytes, bytes]) -> float | None:
    """Seconds that an engine asks for; dates and nonsense are passed over."""
    value = headers.get(b"retry-after", b"")
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(max(0.0, seconds), RETRY_AFTER_MAX_S) if math.isfinite(seconds) else None
