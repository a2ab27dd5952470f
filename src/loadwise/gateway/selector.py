"""A user's selector behind HTTP: asked once a program; whatever goes wrong, the router's own policy decides.

It is posted `{decision, program, candidates, context, task_type, domain}` and answers `{"model": name}`, with
`"propensity"` in (0, 1] where it chose by chance.
"""

import asyncio

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.ids import ModelId
from loadwise.router.config import SelectorConfig
from loadwise.wire.client import Upstream, UpstreamError
from loadwise.wire.heads import JSON_TYPE, Ticker

from .host import Host


class _Said(msgspec.Struct):
    model: str
    propensity: float | None = None


_decode = msgspec.json.Decoder(_Said).decode
_encode = msgspec.json.Encoder().encode


class Selector:
    """Carries `AskSelector` to the user's URL and brings the answer back as an event."""

    def __init__(self, config: SelectorConfig, ticker: Ticker) -> None:
        self._upstream = Upstream(config.url, ticker=ticker)
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
            answer = await self._upstream.fetch(b"POST", "", JSON_TYPE, body, timeout_s=command.timeout_s)
            said = _decode(answer.body)
            model, propensity = ModelId(said.model), said.propensity
            if answer.status != 200 or (propensity is not None and not 0.0 < propensity <= 1.0):
                model, detail = None, f"answered {answer.status}, propensity {propensity}"
        except (UpstreamError, msgspec.DecodeError) as error:
            detail = str(error)[:200]
        host = self.host
        assert host is not None
        host.post(
            e.SelectorAnswered(
                at_s=host.now_s(),
                decision_id=command.decision_id,
                model=model,
                propensity=propensity if model is not None else None,
                detail=detail,
            )
        )

    async def close(self) -> None:
        """Forget open questions."""
        for task in self._tasks:
            task.cancel()
        await self._upstream.close()
