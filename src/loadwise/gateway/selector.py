"""A user's selector behind HTTP: asked once a program; whatever goes wrong, the router's own policy decides.

It is posted `{decision, program, candidates, context, task_type, domain}` and answers `{"model": name}`, with
`"propensity"` in (0, 1] where it chose by chance.
"""

import asyncio
from urllib.parse import urlsplit

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.ids import ModelId
from loadwise.router.config import SelectorConfig
from loadwise.wire.client import Upstream, UpstreamError
from loadwise.wire.heads import JSON_TYPE, Ticker

from .host import Host
from .openai import UNREADABLE


class _Said(msgspec.Struct):
    model: str
    propensity: float | None = None


_decode = msgspec.json.Decoder(_Said).decode
_encode = msgspec.json.Encoder().encode


class Selector:
    """Carries `AskSelector` to the user's URL and brings the answer back as an event."""

    def __init__(self, config: SelectorConfig, ticker: Ticker) -> None:
        """Prepare; nothing is connected yet.

        Raises:
            ConfigError: the url is not one that can be asked.
        """
        parts = urlsplit(config.url)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            self._upstream = Upstream(f"{parts.scheme}://{parts.netloc}", ticker=ticker)
        except ValueError as error:
            raise ConfigError(f"router.selector.url is {config.url!r}: {error}") from error
        if not (self._target.isascii() and self._target.isprintable()) or " " in self._target:
            raise ConfigError(f"router.selector.url is {config.url!r}; path and query must be printable ASCII")
        self._tasks: set[asyncio.Task[None]] = set()
        self.host: Host | None = None

    def ask(self, command: c.AskSelector) -> None:
        """Send the question; bounded by the router's own timer."""
        task = asyncio.get_running_loop().create_task(self._ask(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, command: c.AskSelector) -> None:
        body = _encode(
            {
                "decision": command.decision_id,
                "program": command.program_id,
                "candidates": command.candidates,
                "context": command.context,
                "task_type": command.task_type,
                "domain": command.domain,
            }
        )
        model: ModelId | None = None
        propensity: float | None = None
        detail = ""
        try:
            answer = await self._upstream.fetch(
                b"POST", self._target, JSON_TYPE, body, timeout_s=command.timeout_s, from_root=True
            )
            if answer.status != 200:
                detail = f"answered {answer.status}"
            else:
                model, propensity, detail = _read(answer.body, command.candidates)
        except UpstreamError as error:
            detail = str(error)[:200]
        host = self.host
        assert host is not None
        host.post(
            e.SelectorAnswered(
                at_s=host.now_s(),
                decision_id=command.decision_id,
                model=model,
                propensity=propensity,
                detail=detail,
            )
        )

    async def close(self) -> None:
        """Forget open questions."""
        for task in self._tasks:
            task.cancel()
        await self._upstream.close()


def _read(body: bytes, candidates: tuple[str, ...]) -> tuple[ModelId | None, float | None, str]:
    """What the selector chose: model, propensity, and where there is no model, why not."""
    try:
        said = _decode(body)
    except UNREADABLE as error:
        return None, None, f"the answer cannot be read: {error}"[:200]
    if said.model not in candidates:
        return None, None, f"{said.model[:100]!r} is not a candidate"
    if said.propensity is not None and not 0.0 < said.propensity <= 1.0:
        return None, None, f"propensity {said.propensity!r} is not in (0, 1]"
    return ModelId(said.model), said.propensity, ""
