"""Asks on behalf of verifiers: models of the pool as turns through the router, and the user's webhooks.

A judge's call is a program of its own (`lw-judge-…`), so its load is admitted and its cost accounted like any other's;
its task type is none, so it is judged by nobody, and it ends as `internal`, so it teaches nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from loadwise.kernel import events as e
from loadwise.kernel.errors import Error
from loadwise.kernel.ids import ProgramId
from loadwise.kernel.pool import price_usd
from loadwise.kernel.work import EndReason
from loadwise.verify.check import AskModel, CallWebhook, Finding, FindingStatus
from loadwise.wire.client import Answer, Upstream, UpstreamError
from loadwise.wire.exchange import Exchange
from loadwise.wire.heads import JSON_TYPE, Ticker

from .intake import answer_text
from .openai import UNREADABLE
from .turns import Turns

JUDGE_PREFIX = "lw-judge-"
TENANT = "loadwise"
"""Owner of the judges' programs: no client has this label, so none can add a turn to them."""
ASKED_ELSEWHERE = "models are asked by a gateway that serves only"
WEBHOOKS_MAX = 256
_status = FindingStatus
_encode = msgspec.json.Encoder().encode


class InnerExchange:
    """A client's place in a relay, taken by ourselves: the answer goes to a callback."""

    def __init__(self, on_answer: Callable[[int, bytes], None]) -> None:
        self.on_disconnect: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.is_open = True
        self.is_started = False
        self._on_answer = on_answer
        self._pieces: list[bytes] = []
        self._status = 0

    def respond(self, status: int, headers: bytes = b"", body: bytes = b"") -> None:
        """A whole answer."""
        if self.is_open:
            self._finish(status, body)

    def start(self, status: int, headers: bytes = b"") -> None:
        """An engine that streams although it was not asked to."""
        self.is_started, self._status = True, status

    def write(self, data: bytes) -> None:
        """A piece of a stream."""
        self._pieces.append(data)

    def end(self) -> None:
        """The stream's end."""
        if self.is_open:
            self._finish(self._status, b"".join(self._pieces))

    def leave(self) -> None:
        """We wait no longer."""
        if self.is_open:
            self.is_open = self.is_started = False
            told, self.on_disconnect = self.on_disconnect, None
            if told is not None:
                told()

    def _finish(self, status: int, body: bytes) -> None:
        self.is_open = self.is_started = False
        self.on_disconnect = self.on_pause = self.on_resume = None
        self._on_answer(status, body)


class Asking:
    """Carries out `AskModel` and `CallWebhook`.

    Args:
        turns: where model calls enter; None where no gateway runs (in `doctor`): models are refused.
    """

    def __init__(self, turns: Turns | None, ticker: Ticker) -> None:
        self._turns = turns
        self._ticker = ticker
        self._upstream_by_origin: dict[str, Upstream] = {}
        self._n_asked = 0

    async def ask(self, check: AskModel | CallWebhook) -> Finding:
        """Ask; never raises for what comes back."""
        loop = asyncio.get_running_loop()
        began_at_s = loop.time()
        try:
            found = await (self._webhook(check) if isinstance(check, CallWebhook) else self._model(check))
        except Error as error:
            is_passing = error.status in (429, 500, 502, 503, 504)
            found = Finding(status=_status.ERROR if is_passing else _status.REFUSED, reason=error.message[:300])
        return msgspec.structs.replace(found, took_s=loop.time() - began_at_s)

    async def _webhook(self, check: CallWebhook) -> Finding:
        parts = urlsplit(check.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        origin = f"{parts.scheme}://{parts.netloc}"
        if not (target.isascii() and target.isprintable()) or " " in target:
            return Finding(status=_status.REFUSED, reason=f"the path of {check.url!r} is not printable ASCII"[:300])
        try:
            upstream = self._upstream(origin)
            body = _encode(check.body)
        except (ValueError, TypeError, RecursionError) as error:
            return Finding(status=_status.REFUSED, reason=str(error)[:300])
        try:
            answer = await upstream.fetch(
                b"POST",
                target,
                JSON_TYPE,
                body,
                timeout_s=check.wall_s,
                most_bytes=check.output_bytes,
                from_root=True,
            )
        except UpstreamError as error:
            status = _status.TIMEOUT if error.kind.endswith("timeout") else _status.ERROR
            return Finding(status=status, reason=f"{origin}: {error}"[:300])
        return _webhook_finding(answer, origin)

    def _upstream(self, origin: str) -> Upstream:
        upstream = self._upstream_by_origin.get(origin)
        if upstream is None:
            if len(self._upstream_by_origin) >= WEBHOOKS_MAX:
                raise ValueError(f"more than {WEBHOOKS_MAX} webhook services")
            upstream = self._upstream_by_origin[origin] = Upstream(origin, ticker=self._ticker)
        return upstream

    async def _model(self, check: AskModel) -> Finding:
        turns = self._turns
        if turns is None:
            return Finding(status=_status.REFUSED, reason=ASKED_ELSEWHERE)
        answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def on_answer(status: int, body: bytes) -> None:
            if not answered.done():
                answered.set_result((status, body))

        exchange = InnerExchange(on_answer)
        self._n_asked += 1
        program_id = ProgramId(f"{JUDGE_PREFIX}{turns.host.run_id}-{self._n_asked}")
        model = self._named(turns, check.model)
        turns.ask_inside(cast(Exchange, exchange), program_id, _request(check, model), tenant=TENANT)
        try:
            async with asyncio.timeout(check.wall_s):
                status, body = await answered
        except TimeoutError:
            reason = f"no answer within {check.wall_s:g} s"
            return Finding(status=_status.TIMEOUT, reason=reason, cost_usd=_cost_usd(turns, program_id))
        finally:
            exchange.leave()
            cost_usd = _cost_usd(turns, program_id)
            ended = e.ProgramEnded(at_s=turns.host.now_s(), program_id=program_id, reason=EndReason.INTERNAL)
            turns.host.post(ended)
        return _model_finding(status, body, cost_usd)

    def _named(self, turns: Turns, model: str | None) -> str:
        """The model to ask. Where new programs wait for verdicts, an unnamed judge would wait for its own."""
        if model is not None or turns.host.router.config.feedback.arm == "delayed":
            return e.AUTO if model is None else model
        models = turns.host.router.backends.model_by_id
        return max(
            turns.offered_models(), key=lambda name: (price_usd(models[name].usd_per_million, 10**6, 10**6, 0), name)
        )

    async def close(self) -> None:
        """Close the connections to webhooks."""
        for upstream in self._upstream_by_origin.values():
            await upstream.close()


def _request(check: AskModel, model: str) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": _sound(m.content)} for m in check.messages],
        "max_tokens": check.max_tokens,
        "temperature": check.temperature,
    }
    return _encode(body)


def _sound(text: str) -> str:
    """Halves of surrogate pairs are no text that an engine takes."""
    return text.encode("utf-8", "replace").decode()


def _cost_usd(turns: Turns, program_id: ProgramId) -> float:
    program = turns.host.router.table.by_id.get(program_id)
    return 0.0 if program is None else program.cost_usd


def _model_finding(status: int, body: bytes, cost_usd: float) -> Finding:
    if status == 200:
        text = answer_text(body)
        if text is not None:
            return Finding(text=text, cost_usd=cost_usd)
        return Finding(status=_status.ERROR, reason="the model's answer cannot be read", cost_usd=cost_usd)
    is_passing = status in (408, 425, 429) or status >= 500
    said = _message(body)
    return Finding(
        status=_status.ERROR if is_passing else _status.REFUSED,
        reason=f"the model's call ended with {status}: {said}"[:300],
        exit_code=status,
        cost_usd=cost_usd,
    )


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        return body[:100].decode("utf-8", "replace")


def _webhook_finding(answer: Answer, origin: str) -> Finding:
    if answer.status == 429 or answer.status >= 500:
        return Finding(
            status=_status.ERROR,
            reason=f"{origin} answered {answer.status}",
            exit_code=answer.status,
            stdout=answer.body,
        )
    return Finding(exit_code=answer.status, stdout=answer.body)
