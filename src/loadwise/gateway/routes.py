"""Which path answers what."""

import hmac
from collections.abc import Callable
from urllib.parse import unquote

from loadwise.kernel.errors import CallerError, Conflict, Error
from loadwise.kernel.events import AUTO, ModelForgotten
from loadwise.kernel.ids import ModelId
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE

from .answers import error_body, respond_error, respond_json
from .guard import Guard
from .programs import Programs
from .tenants import key_of
from .turns import Turns

_TEXT = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"


class Unauthorised(CallerError):
    status = 401
    code = "invalid_api_key"


class Routes:
    """The handler of the gateway's server.

    Args:
        guard: keeps web pages out.
        state: what `/readyz` and `/` tell, and whether the gateway is ready.
    """

    def __init__(
        self,
        turns: Turns,
        programs: Programs,
        *,
        guard: Guard,
        state: Callable[[], tuple[bool, dict[str, object]]],
    ) -> None:
        self._turns = turns
        self._programs = programs
        self._keys = turns.tenants.keys
        self._guard = guard
        self._state = state
        self._get: dict[bytes, Callable[[Exchange], None]] = {
            b"/v1/models": self._models,
            b"/v1/programs": programs.list,
            b"/metrics": self._metrics,
            b"/healthz": lambda exchange: respond_json(exchange, {"status": "alive"}),
            b"/readyz": self._readyz,
            b"/": self._root,
        }
        self._post: dict[bytes, Callable[[Exchange], None]] = {
            b"/v1/chat/completions": self._chat,
            b"/v1/completions": self._complete,
        }
        self._open_paths = frozenset({b"/healthz", b"/readyz"})

    def handle(self, exchange: Exchange) -> None:
        """Answer an exchange, now or through a relay later."""
        headers = exchange.headers
        is_known = b"origin" not in headers and headers.get(b"host") in self._guard.known_hosts
        if is_known and not self._keys and exchange.path == b"/v1/chat/completions" and exchange.method == b"POST":
            self._turns.take(exchange, b"/chat/completions", prompt_field="messages")
            return
        try:
            if not is_known and not self._guard.admit(exchange):
                return
            self._require_key(exchange)
            self._route(exchange)
        except Error as error:
            self._turns.meter.count_refusal(error.status)
            respond_error(exchange, error)

    def _require_key(self, exchange: Exchange) -> None:
        if not self._keys or exchange.path in self._open_paths:
            return
        scheme = exchange.headers.get(b"authorization", b"").partition(b" ")[0]
        said = key_of(exchange.headers)
        n_equal = sum(hmac.compare_digest(said, key) for key in self._keys)  # as long for a wrong key
        if n_equal == 0 or scheme.lower() != b"bearer":
            raise Unauthorised("no valid API key was given (Authorization: Bearer ...)")

    def _route(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        table = self._get if method in (b"GET", b"HEAD") else self._post if method == b"POST" else {}
        answer = table.get(path)
        if answer is not None:
            answer(exchange)
        elif path.startswith(b"/v1/programs/"):
            self._program(exchange, path[len(b"/v1/programs/") :], method)
        elif path.startswith(b"/v1/models/"):
            self._model(exchange, path[len(b"/v1/models/") :])
        elif path in self._get or path in self._post:
            self._refuse_method(exchange, b"GET" if path in self._get else b"POST")
        else:
            self._not_found(exchange)

    def _program(self, exchange: Exchange, rest: bytes, method: bytes) -> None:
        segment, _, verb = rest.partition(b"/")
        allowed = {b"": b"GET", b"finish": b"POST", b"verdict": b"POST"}.get(verb)
        if allowed is None:
            self._not_found(exchange)
        elif method != allowed and (method, allowed) != (b"HEAD", b"GET"):
            self._refuse_method(exchange, allowed)
        elif verb == b"finish":
            self._programs.finish(exchange, segment)
        elif verb == b"verdict":
            self._programs.verdict(exchange, segment)
        else:
            self._programs.show(exchange, segment)

    def _refuse_method(self, exchange: Exchange, allowed: bytes) -> None:
        self._turns.meter.count_refusal(405)
        headers = JSON_TYPE + b"allow: %b\r\n" % allowed
        text = f"{exchange.path.decode('latin-1')} takes {allowed.decode()}, not {exchange.method.decode('latin-1')}"
        exchange.respond(405, headers, error_body(405, text, code="method_not_allowed"))

    def _not_found(self, exchange: Exchange) -> None:
        self._turns.meter.count_refusal(404)
        text = f"{exchange.method.decode('latin-1')} {exchange.path.decode('latin-1')} is not served here"
        exchange.respond(404, JSON_TYPE, error_body(404, text, code="not_found"))

    def _chat(self, exchange: Exchange) -> None:
        self._turns.take(exchange, b"/chat/completions", prompt_field="messages")

    def _complete(self, exchange: Exchange) -> None:
        self._turns.take(exchange, b"/completions", prompt_field="prompt")

    def _models(self, exchange: Exchange) -> None:
        data = [_model_card(name) for name in (AUTO, *self._turns.offered_models())]
        respond_json(exchange, {"object": "list", "data": data})

    def _model(self, exchange: Exchange, segment: bytes) -> None:
        if exchange.method == b"POST" and segment.endswith(b"/forget"):
            self._forget(exchange, unquote(segment.removesuffix(b"/forget").decode("latin-1")))
            return
        if exchange.method not in (b"GET", b"HEAD"):
            self._refuse_method(exchange, b"GET")
            return
        name = unquote(segment.decode("latin-1"))
        self._turns.require_offered(name)
        respond_json(exchange, _model_card(name))

    def _forget(self, exchange: Exchange, name: str) -> None:
        """The model behind a name was swapped: what was learned of it no longer holds."""
        host = self._turns.host
        self._turns.require_offered(name)
        if name == AUTO:
            raise CallerError(f"{AUTO} is no model; name one of the pool", param="model")
        if not host.router.credit.can_forget:
            policy = host.router.config.policy.name
            text = f"policy {policy!r} cannot forget one model; policy 'drift' can"
            raise Conflict(text, code="policy_cannot_forget")
        host.require_writable()

        def answer(trouble: Error | None) -> None:
            if trouble is not None:
                respond_error(exchange, trouble)
            else:
                respond_json(exchange, {"model": name, "forgotten": True})

        host.post(ModelForgotten(at_s=host.now_s(), model=ModelId(name)), answer)

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, _TEXT, self._turns.meter.page(self._turns))

    def _readyz(self, exchange: Exchange) -> None:
        is_ready, state = self._state()
        respond_json(exchange, state, 200 if is_ready else 503)

    def _root(self, exchange: Exchange) -> None:
        respond_json(exchange, {"name": "loadwise", **self._state()[1]})


def _model_card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "loadwise"}
