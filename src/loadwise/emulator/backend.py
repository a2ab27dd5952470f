"""One emulated backend: routes of an engine's HTTP server, from a request to the engine's time and back as tokens."""

import time
from collections.abc import Callable

import msgspec

from loadwise.kernel.errors import ConfigError, Error, Overloaded
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams
from loadwise.sim.engine import ContextTooLong
from loadwise.sim.scenario import EngineSpec, open_engine
from loadwise.sim.simple_engine import SimpleEngineSpec
from loadwise.sim.vllm_engine import VllmEngineSpec
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE, header_block
from loadwise.wire.server import Limits, Server

from .call import EmulatedCall
from .control import CONTROL_PATH, Control
from .conversation import BLOCK_TOKENS, Conversations, Place, normal_reply, prompt_parts, text_tokens
from .dialect import Said, cut, error_answer, parse_call
from .driver import EngineDriver
from .fault import FAULT_HEADER, Fault, parse_fault
from .metrics import EngineMetrics
from .script import Script

_METRICS_TYPE = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
VERSION = "loadwise-emulator"


class EmulatedBackendSpec(Fact, frozen=True, kw_only=True):
    """One emulated engine process."""

    name: str
    model: str
    """The name it serves its model under."""
    engine: EngineSpec = SimpleEngineSpec()
    port: int | None = None
    """Absent: the emulator's own first port plus this backend's position, or any free one."""
    context_tokens: int | None = None
    """Longest context the model accepts; the engine's KV is a limit in any case."""
    fault: Fault | None = None
    """Befalls every request, or a share of them."""

    def __post_init__(self) -> None:
        if not self.name or not self.model:
            raise ConfigError(f"an emulated backend is named {self.name!r} and serves {self.model!r}; both need a name")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"port of backend {self.name!r} is {self.port!r}; it must be in 0..65535")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ConfigError(f"context_tokens of backend {self.name!r} is {self.context_tokens!r}; it must be >= 1")


class EmulatedBackend:
    """A running engine server. `fault` may be set and cleared at any time; `go_down` and `come_up` play a crash."""

    def __init__(
        self,
        spec: EmulatedBackendSpec,
        script: Script,
        *,
        scale: float,
        seed: int,
        has_fault_header: bool,
        clock: Callable[[], float] | None = None,
        is_stepped: bool = False,
    ) -> None:
        """
        Args:
            is_stepped: Time stands still until a client moves it (`control`).
        """
        self.spec = spec
        self.fault = spec.fault
        self.url = ""
        """`http://host:port/v1`, once it listens."""
        self._script = script
        self._scale = scale
        self._has_fault_header = has_fault_header
        self._streams = Streams(seed)
        self._clock = clock
        self._control = Control(self) if is_stepped else None
        self._seed = seed
        self._address = ("127.0.0.1", 0)
        self._server: Server | None = None
        self._conversations = Conversations()
        self._metrics = EngineMetrics(spec.model)
        self._n_calls = 0
        self._calls: dict[int, EmulatedCall] = {}
        self._is_hung = False
        self.driver = self._open_driver(0.0)

    async def listen(self, host: str, port: int) -> None:
        """Accept connections.

        Raises:
            OSError: the address is taken.
        """
        server = Server(self.handle, Limits())
        (address,) = await server.listen(host, port)
        self._server, self._address = server, address
        self.url = f"http://{address[0]}:{address[1]}/v1"

    async def go_down(self) -> None:
        """Die: cut what runs, refuse what comes, forget the cache."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.close(grace_s=0.0)
        self.restart()

    def restart(self) -> None:
        """Begin anew with an empty cache: whatever ran is broken off, and nobody hears of it any more."""
        self.driver.close()
        for call in list(self._calls.values()):
            call.break_connection()
        self._calls.clear()
        self.driver = self._open_driver(self.driver.now_s)
        self._conversations = Conversations()

    async def come_up(self) -> None:
        """Listen again, on the same port."""
        if self._server is None:
            await self.listen(*self._address)

    def hang(self) -> None:
        """Take connections and requests, and answer nothing, until `recover`."""
        self._is_hung = True
        self.driver.pause()

    async def recover(self) -> None:
        """Be up, answering and at full speed, whatever was wrong."""
        if self._is_hung:
            self._is_hung = False
            self.driver.resume()
        self.driver.set_speed(1.0)
        await self.come_up()

    async def close(self) -> None:
        """Stop for good."""
        self.driver.close()
        if self._server is not None:
            server, self._server = self._server, None
            await server.close(grace_s=0.0)

    def handle(self, exchange: Exchange) -> None:
        """Answer one HTTP request, now or later."""
        path, method = exchange.path, exchange.method
        if self._control is not None and path.startswith(CONTROL_PATH):
            self._control.handle(exchange)
        elif method == b"POST" and path in (b"/v1/chat/completions", b"/v1/completions"):
            self._complete(exchange)
        elif self._is_hung:
            return
        elif method not in (b"GET", b"HEAD"):
            self.refuse(exchange, Error(f"{method.decode()} {path.decode('latin-1')} is not served"), 404)
        elif path == b"/health":
            exchange.respond(200)
        elif path == b"/metrics":
            exchange.respond(200, _METRICS_TYPE, self.metrics_text())
        elif path == b"/v1/models":
            exchange.respond(200, JSON_TYPE, msgspec.json.encode({"object": "list", "data": [self._model_card()]}))
        elif path == b"/version":
            exchange.respond(200, JSON_TYPE, msgspec.json.encode({"version": VERSION}))
        else:
            self.refuse(exchange, Error(f"GET {path.decode('latin-1')} is not served"), 404)

    def metrics_text(self, at_s: float | None = None) -> bytes:
        """The page of metrics; in stepped time as it is at some other instant."""
        return self._metrics.text(self.driver.engine, self.driver.signals(at_s))

    def created_at_s(self) -> int:
        """The `created` of an answer."""
        return int(self.driver.felt_s if self._control is not None else time.time())

    def _open_driver(self, at_s: float) -> EngineDriver:
        engine = open_engine(self.spec.engine, Streams(self._seed), self.spec.name)
        stepped_from_s = at_s if self._control is not None else None
        return EngineDriver(engine, self._scale, clock=self._clock, stepped_from_s=stepped_from_s)

    @property
    def _block_tokens(self) -> int:
        return self.spec.engine.block_tokens if isinstance(self.spec.engine, VllmEngineSpec) else BLOCK_TOKENS

    @property
    def _context_limit_tokens(self) -> int | None:
        limits = [self.spec.context_tokens, getattr(self.spec.engine, "kv_tokens", None)]
        return min((limit for limit in limits if limit is not None), default=None)

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self.spec.model,
            "object": "model",
            "created": 0,
            "owned_by": "loadwise",
            "max_model_len": self._context_limit_tokens,
        }

    def _complete(self, exchange: Exchange) -> None:
        try:
            fault = self._fault_of(exchange)
            is_chat = exchange.path == b"/v1/chat/completions"
            call = parse_call(
                exchange.body, is_chat=is_chat, models=(self.spec.model,), block_tokens=self._block_tokens
            )
            said = cut(self._script(call.body), call)
            place = self._conversations.find(call.parts)
            self._check_context(place, said)
        except Error as error:
            self.refuse(exchange, error, error.status)
            return
        self._n_calls += 1
        one = EmulatedCall(self, exchange, call, said, place, self._n_calls, fault)
        if fault is not None and fault.kind == "status":
            retry_after = fault.retry_after_s
            head = b"" if retry_after is None else header_block([("retry-after", f"{retry_after:g}")])
            exchange.respond(fault.status, JSON_TYPE + head, error_answer(Error("an emulated fault"), fault.status))
        elif fault is not None and fault.kind == "slow":
            one.start_later(fault.delay_s)
        elif fault is None or fault.kind != "hang":
            one.start()

    def _fault_of(self, exchange: Exchange) -> Fault | None:
        header = exchange.headers.get(FAULT_HEADER) if self._has_fault_header else None
        if header is not None:
            return parse_fault(header)
        fault = self.fault
        if fault is None or fault.ratio >= 1.0:
            return fault
        luck = float(self._streams.at(f"fault/{self.spec.name}", self._n_calls).random())
        return fault if luck < fault.ratio else None

    def _check_context(self, place: Place, said: Said) -> None:
        limit, total = self._context_limit_tokens, place.prompt_tokens + said.n_tokens
        if limit is not None and total > limit:
            raise ContextTooLong(
                f"This model's maximum context length is {limit} tokens. However, the request has "
                f"{place.prompt_tokens} input tokens and would say {said.n_tokens}.",
                param="messages",
            )

    def refuse(self, exchange: Exchange, error: Error, status: int) -> None:
        """Answer with an error."""
        head = JSON_TYPE
        if isinstance(error, Overloaded):
            head += header_block([("retry-after", f"{error.retry_after_s:g}")])
        exchange.respond(status, head, error_answer(error, status, error.param))

    def began(self, one: EmulatedCall) -> None:
        """The engine has taken a call."""
        self._calls[one.number] = one

    def refused(self, one: EmulatedCall) -> None:
        """The engine has not taken it after all."""
        self._calls.pop(one.number, None)

    def finished(self, one: EmulatedCall, reason: str) -> None:
        """A call is over: count it, and remember where its conversation now ends."""
        self._calls.pop(one.number, None)
        self._metrics.count_finished(reason)
        if reason in ("abort", "error"):
            return
        self._metrics.whole.observe(self.driver.felt_s - one.began_s)
        call, reply, n_said = one.call, one.said.reply, one.said.n_tokens
        if call.is_chat:
            context = [*call.parts, normal_reply(reply)]
            n_shown = text_tokens(context[-1])
        else:
            context = prompt_parts("".join(call.parts) + reply.text, self._block_tokens)
            if len(context) > 1 and len(context[-1]) < len(context[0]):
                context.pop()
            n_shown = text_tokens(reply.text)
        # What was said but not shown (reasoning) cannot be sent back, so only the prompt is known then.
        self._conversations.remember_reply(one.place, context, n_said if n_said <= n_shown else 0)

    def first_token(self, one: EmulatedCall) -> None:
        """A call has its first token."""
        self._metrics.first_token.observe(self.driver.felt_s - one.began_s)
