"""How a client moves a stepped engine: its clock, its speed, its death. Served only where the emulator is stepped.

    GET  /emulator                       {now_s, due_after_s, token_due_at_s, running, n_open}
    POST /emulator/step  {"to_s": 1.5}   moves the clock; without `to_s` to the next token. Adds `said`
    POST /emulator/step  {"at_s": 1.5}   the same in one call of the engine, as a host does after a pause
    POST /emulator/speed {"ratio": 0.5}  steps that begin from now on take twice as long
    POST /emulator/restart               what runs is broken off, the cache is empty, the clock goes on
    GET  /emulator/metrics?at_s=1.5      `/metrics` as it is at that instant, without moving anything

What comes or goes while the clock stands is seen by the engine at the next step, whose first act it is. `running` are
the numbers of the requests that the engine has let in, in its order; a request learns its number from the header
`x-request-id` of its answer. `said` is what was said since the last step, in order: `{at_s, id, n_new_tokens, is_first,
is_finished, cached_tokens}`. Every call checks the engine's books.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from loadwise.kernel.errors import CallerError, Error
from loadwise.sim.bounds import SECONDS_MAX
from loadwise.sim.vllm_engine import VllmEngine
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE

from .driver import Heard

if TYPE_CHECKING:
    from .backend import EmulatedBackend

CONTROL_PATH = b"/emulator"


class Control:
    """See the module."""

    def __init__(self, backend: "EmulatedBackend") -> None:
        self._backend = backend

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        try:
            answer = self._answer(exchange)
            self._backend.driver.engine.check()
        except Error as error:
            # A wrong number in a request is the caller's fault, whoever found it.
            status = 400 if error.code == "config_error" else error.status
            self._backend.refuse(exchange, error, status)
            return
        exchange.respond(200, JSON_TYPE, answer)

    def _answer(self, exchange: Exchange) -> bytes:
        backend = self._backend
        what = (exchange.method, exchange.path.removeprefix(CONTROL_PATH))
        heard: list[Heard] | None = None
        if what == (b"POST", b"/step"):
            asked = _numbers(exchange.body, "to_s", "at_s")
            if len(asked) > 1:
                raise CallerError("the body has to_s and at_s; it may have one of them", param="at_s")
            to_s = next(iter(asked.values()), None)
            heard = backend.driver.advance(to_s, in_one_call="at_s" in asked)
        elif what == (b"POST", b"/speed"):
            ratio = _numbers(exchange.body, "ratio").get("ratio")
            if ratio is None or not 1e-6 <= ratio <= 1000:
                raise CallerError(f"ratio is {ratio!r}; it must be a number in [1e-06, 1000]", param="ratio")
            backend.driver.set_speed(ratio)
        elif what == (b"POST", b"/restart"):
            backend.restart()
        elif what == (b"GET", b"/metrics"):
            return backend.metrics_text(_instant(exchange.query))
        elif what != (b"GET", b""):
            path = exchange.path.decode("latin-1")
            raise CallerError(f"{exchange.method.decode()} {path} is not served; see the emulator's control routes")
        return msgspec.json.encode(self._state(heard))

    def _state(self, heard: list[Heard] | None) -> dict[str, Any]:
        driver = self._backend.driver
        engine = driver.engine
        state: dict[str, Any] = {
            "now_s": driver.now_s,
            "due_after_s": driver.due_after_s,
            "token_due_at_s": driver.token_due_at_s,
            "n_open": driver.n_open,
        }
        if isinstance(engine, VllmEngine):
            state["running"] = [call.request.request_id for call in engine.scheduler.running]
        if heard is not None:
            state["said"] = [_said(one) for one in heard]
        return state


def _said(heard: Heard) -> dict[str, Any]:
    output = heard.output
    return {
        "at_s": heard.at_s,
        "id": output.request_id,
        "n_new_tokens": output.n_new_tokens,
        "is_first": output.is_first,
        "is_finished": output.is_finished,
        "cached_tokens": output.cached_tokens,
    }


def _numbers(body: bytes, *names: str) -> dict[str, float]:
    try:
        asked = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise CallerError(f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise CallerError(f"the body is {type(asked).__name__}, not an object")
    for name, value in asked.items():
        if name not in names:
            raise CallerError(f"{name!r} is unknown here; valid: {', '.join(names)}", param=name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CallerError(f"{name} is {value!r}; it must be a number", param=name)
        if abs(value) > SECONDS_MAX:  # an integer of JSON may be larger than any float
            raise CallerError(f"{name} is beyond {SECONDS_MAX:.0f}", param=name)
    return {name: float(value) for name, value in asked.items()}


def _instant(query: bytes) -> float | None:
    name, _, value = query.partition(b"=")
    if not query:
        return None
    try:
        at_s = float(value)
    except ValueError:
        at_s = -1.0
    if name != b"at_s" or not 0 <= at_s < float("inf"):
        raise CallerError(f"the query is {query!r}; it must be at_s=SECONDS", param="at_s")
    return at_s
