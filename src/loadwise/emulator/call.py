"""One model call between its HTTP exchange and the engine: tokens become bytes, a lost client stops the engine."""

import asyncio
from typing import TYPE_CHECKING

from loadwise.kernel.errors import Error
from loadwise.sim.engine import EngineRequest, Output
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import EVENT_STREAM, JSON_TYPE, header_block

from .conversation import Place
from .dialect import DONE, CallRequest, Said, Voice, usage
from .fault import Fault

if TYPE_CHECKING:
    from .backend import EmulatedBackend


class EmulatedCall:
    """See the module."""

    def __init__(
        self,
        backend: "EmulatedBackend",
        exchange: Exchange,
        call: CallRequest,
        said: Said,
        place: Place,
        number: int,
        fault: Fault | None,
    ) -> None:
        self.call = call
        self.said = said
        self.place = place
        self._backend = backend
        self._driver = backend.driver
        self.began_s = self._driver.felt_s
        self._exchange = exchange
        self.number = number
        self._fault = fault
        self._voice = Voice(call, said, f"{backend.spec.name}-{number}", backend.spec.model, backend.created_at_s())
        self._n_said = 0
        self._has_opened = False
        self._cached_tokens = 0
        self._later: asyncio.TimerHandle | None = None
        exchange.on_disconnect = self._client_left

    def start(self) -> None:
        """Hand the call to the engine."""
        self._later = None
        request = EngineRequest(
            request_id=self.number,
            program_id=self.place.key,
            prompt_tokens=self.place.prompt_tokens,
            output_tokens=self.said.n_tokens,
            prefix_tokens=self.place.prefix_tokens,
            line=self.place.line,
            priority=self.call.priority,
            luck=self.number,
        )
        if self._is_fault("reset", "truncate") and self._fault_tokens == 0:
            self._exchange.abort()
            return
        self._backend.began(self)
        try:
            self._driver.submit(request, self._hear, is_stream=self.call.is_stream)
        except Error as error:
            self._backend.refused(self)
            self._backend.refuse(self._exchange, error, error.status)
            return
        if self._driver.is_stepped and self.call.is_stream and not self._exchange.is_started:
            # The head says that the engine has it: a client that moves the clock must know before it does.
            self._exchange.start(200, EVENT_STREAM + header_block([("x-request-id", str(self.number))]))

    def start_later(self, delay_s: float) -> None:
        """Begin after so many real seconds, unless the client leaves."""
        self._later = asyncio.get_running_loop().call_later(delay_s, self.start)

    def break_connection(self) -> None:
        """The engine died: so does the connection, and the client sees just that."""
        if self._later is not None:
            self._later.cancel()
        self._exchange.on_disconnect = None
        if self._exchange.is_open:
            self._exchange.abort()

    def _client_left(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._driver.cancel(self.number)
        self._backend.finished(self, "abort")

    def _hear(self, output: Output) -> None:
        if output.is_first:
            self._cached_tokens = output.cached_tokens
            self._backend.first_token(self)
        before, self._n_said = self._n_said, self._n_said + output.n_new_tokens
        if self._is_fault("reset", "truncate") and self._n_said >= self._fault_tokens:
            self._break_off(self._fault_tokens - before)
            return
        if self.call.is_stream:
            self._stream(output)
        elif output.is_finished:
            body = self._voice.whole(self._usage())
            if self._is_fault("invalid_json"):
                body = body[: len(body) // 2] + b"\xff{"
            self._exchange.respond(200, JSON_TYPE, body)
        if output.is_finished:
            self._backend.finished(self, self.said.finish_reason)

    def _stream(self, output: Output) -> None:
        data = b""
        if not self._exchange.is_started:
            self._exchange.start(200, EVENT_STREAM)
        if not self._has_opened:
            self._has_opened = True
            data = self._voice.opening()
        data += self._voice.pieces(output.n_new_tokens)
        if output.is_finished:
            data += self._voice.closing(self._usage() if self.call.wants_usage else None) + DONE
        if self._is_fault("invalid_json"):
            data = data.replace(b"{", b"<")
        self._exchange.write(data)
        if output.is_finished:
            self._exchange.end()

    def _usage(self) -> dict[str, object] | None:
        if self._is_fault("no_usage"):
            return None
        return usage(self.place.prompt_tokens, self.said.n_tokens, self._cached_tokens)

    def _is_fault(self, *kinds: str) -> bool:
        return self._fault is not None and self._fault.kind in kinds

    @property
    def _fault_tokens(self) -> int:
        """After how many tokens it breaks; never after the last one, or the answer would be whole."""
        return 0 if self._fault is None else min(self._fault.after_tokens, self.said.n_tokens)

    def _break_off(self, n_tokens: int) -> None:
        """Say `n_tokens` more and then, in the middle of a line, nothing."""
        exchange = self._exchange
        if not exchange.is_started:
            exchange.start(200, EVENT_STREAM if self.call.is_stream else JSON_TYPE)
        if not self._has_opened:
            self._has_opened = True
            exchange.write(self._voice.opening() if self.call.is_stream else self._voice.whole(None)[:20])
        if self.call.is_stream:
            exchange.write(self._voice.pieces(n_tokens) + b'data: {"id": "cut')
        if self._is_fault("truncate"):
            exchange.end()
        else:
            exchange.abort()
        self._driver.cancel(self.number)
        self._backend.finished(self, "error")
