"""Adoption in two lines: tell a gateway which calls belong together, when they are over and what came of them.

    with loadwise.program(client, task="patch") as p:
        answer = p.client.chat.completions.create(model="auto", messages=[...])
    p.verdict("pass")

Works with the clients of the `openai` package, which is not imported here: whoever has a client has it loaded.
"""

import inspect
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

RETRY_PAUSES_S = (0.1, 0.3, 1.0, 3.0)
"""Seconds before each further try of a report that did not reach the gateway."""

_TIMEOUT_S = 15.0
_ID_MAX_CHARS = 256
_LABEL_MAX_CHARS = 128
_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_VERDICTS = ("pass", "fail", "abstain")

_log = logging.getLogger("loadwise.client")


def program(
    client: Any,
    task: str | None = None,
    *,
    program_id: str | None = None,
    task_type: str | None = None,
    domain: str | None = None,
    budget_s: float | None = None,
) -> "Program":
    """One agent's whole task as one program of the gateway: `with` an `OpenAI`, `async with` an `AsyncOpenAI`.

    Args:
        client: whose base URL is the gateway's. It is not changed: other threads may use it for other programs, and
            a call that is credited to the wrong program teaches the wrong thing. Calls go through `p.client`.
        task: the task in a word or two. It leads the program's id, and is its type unless `task_type` says otherwise.
        program_id: the program's id, 1 to 256 printable ASCII characters; a unique one where absent.
        task_type: a name under `task_types:` of the pool file, at most 128 characters.
        domain: a name under the context's `domains`, at most 128 characters.
        budget_s: seconds that the program may take, waiting included.

    Raises:
        ValueError: an argument is out of its limits.
        TypeError: the client is none of the `openai` package's.
    """
    headers = {}
    headers["X-Session-ID"] = identity = _checked("program_id", program_id or _new_id(task), _ID_MAX_CHARS)
    if task_type is None and task is not None and _is_label(task, _LABEL_MAX_CHARS):
        task_type = task
    if task_type is not None:
        headers["X-Loadwise-Task-Type"] = _checked("task_type", task_type, _LABEL_MAX_CHARS)
    if domain is not None:
        headers["X-Loadwise-Domain"] = _checked("domain", domain, _LABEL_MAX_CHARS)
    if budget_s is not None:
        if not (math.isfinite(budget_s) and budget_s > 0):
            raise ValueError(f"budget_s is {budget_s!r}; it must be a finite number of seconds > 0")
        headers["X-Loadwise-Budget-S"] = f"{float(budget_s)!r}"
    return Program(client, identity, headers)


class Program:
    """A program as its agent holds it; made by `program`."""

    def __init__(self, client: Any, program_id: str, headers: Mapping[str, str]) -> None:
        if not callable(getattr(client, "with_options", None)) or not callable(getattr(client, "post", None)):
            raise TypeError(f"client is {type(client).__name__}; it must be an openai.OpenAI or openai.AsyncOpenAI")
        self.id = program_id
        self.headers: dict[str, str] = dict(headers)
        """What makes a request part of this program, for libraries that take headers instead of a client."""
        self.client: Any = client.with_options(default_headers=self.headers)
        """The client to call with: a copy on the same connections, whose requests belong to this program."""
        self.artefacts: dict[str, Any] = {}
        """What a verifier needs to see; sent when the program finishes. What is no string is sent as JSON."""
        self.references: dict[str, Any] = {}
        """What would be right, for a verifier to compare with: from your task's data, never from the model."""
        # Retries are ours, so that a report is repeated with the same body and a refusal is not repeated at all.
        self._control: Any = client.with_options(max_retries=0, timeout=_TIMEOUT_S)
        self._is_async = inspect.iscoroutinefunction(client.post)
        self._path = f"/programs/{quote(program_id, safe='')}"
        self._verdict_id = uuid.uuid4().hex
        self.retry: dict[str, Any] | None = None
        """`{"model", "attempt"}` where the last verdict led to another attempt: run the agent again, under this id."""

    def __repr__(self) -> str:
        return f"<loadwise program {self.id!r}>"

    # ---- with an OpenAI ----

    def __enter__(self) -> Self:
        self._require(is_async=False, instead="async with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note(kind)
        try:
            self.finish()
        except Exception as problem:  # An agent's result must not be lost because its ending could not be told.
            self._log_unfinished(problem)

    def finish(self) -> dict[str, Any] | None:
        """Tell that the program is over; a second time changes nothing. Leaving the `with` block does it.

        Returns:
            The gateway's answer; None where it knows no such program, because no call was made.

        Raises:
            openai.APIError: the gateway refused, or cannot be reached.
        """
        self._require(is_async=False, instead="await p.afinish()")
        try:
            return self._report("finish", self._finish_body())
        except Exception as error:
            if _status(error) == 404:
                return None
            raise

    def verdict(
        self,
        verdict: Literal["pass", "fail", "abstain"],
        score: float | None = None,
        *,
        verifier: str | None = None,
        version: str | None = None,
        verdict_id: str | None = None,
        correction: bool = False,
        explanation: str | None = None,
    ) -> dict[str, Any]:
        """Tell how the program turned out, before or after its end. The same verdict again changes nothing.

        Args:
            score: success in [0, 1], where it is finer than passed or failed.
            verifier: who says so.
            version: of the verifier.
            verdict_id: your own id of this verdict; one per program where absent.
            correction: it replaces the verdict that stands; a person's (`verifier="human"`) replaces a machine's
                without it.
            explanation: why, in words.

        Returns:
            `{"program", "credited", "decision"}`, once the verdict is durable.

        Raises:
            ValueError: verdict or score is out of range.
            openai.APIError: the gateway refused (unknown program, another verdict stands), or cannot be reached.
        """
        self._require(is_async=False, instead="await p.averdict(...)")
        body = self._verdict_body(verdict, score, verifier, version, verdict_id, correction, explanation)
        return self._heard(self._report("verdict", body))

    def outcome(self) -> dict[str, Any]:
        """The program as the gateway has it: its `state`, its `verdict`, and `attempts` that are over.

        Where the gateway runs the verifier, ask after `finish` until `state` is `closed` (or `censored`), or
        `is_unanswered` says that another attempt waits for its first turn.
        """
        self._require(is_async=False, instead="await p.aoutcome()")
        found: dict[str, Any] = self._control.get(self._path, cast_to=object)
        return found

    def _report(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                answer: dict[str, Any] = self._control.post(f"{self._path}/{verb}", body=body, cast_to=object)
                return answer
            except Exception as error:
                if pause_s is None or not _is_worth_another_try(error):
                    raise
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    # ---- with an AsyncOpenAI ----

    async def __aenter__(self) -> Self:
        self._require(is_async=True, instead="with")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note(kind)
        try:
            await self.afinish()
        except Exception as problem:  # As in `__exit__`.
            self._log_unfinished(problem)

    async def afinish(self) -> dict[str, Any] | None:
        """`finish` for an `AsyncOpenAI`."""
        self._require(is_async=True, instead="p.finish()")
        try:
            return await self._areport("finish", self._finish_body())
        except Exception as error:
            if _status(error) == 404:
                return None
            raise

    async def averdict(
        self,
        verdict: Literal["pass", "fail", "abstain"],
        score: float | None = None,
        *,
        verifier: str | None = None,
        version: str | None = None,
        verdict_id: str | None = None,
        correction: bool = False,
        explanation: str | None = None,
    ) -> dict[str, Any]:
        """`verdict` for an `AsyncOpenAI`."""
        self._require(is_async=True, instead="p.verdict(...)")
        body = self._verdict_body(verdict, score, verifier, version, verdict_id, correction, explanation)
        return self._heard(await self._areport("verdict", body))

    async def aoutcome(self) -> dict[str, Any]:
        """`outcome` for an `AsyncOpenAI`."""
        self._require(is_async=True, instead="p.outcome()")
        found: dict[str, Any] = await self._control.get(self._path, cast_to=object)
        return found

    async def _areport(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        import asyncio  # here, so that `import loadwise.client` stays light

        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                answer: dict[str, Any] = await self._control.post(f"{self._path}/{verb}", body=body, cast_to=object)
                return answer
            except Exception as error:
                if pause_s is None or not _is_worth_another_try(error):
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    # ---- both ----

    def _require(self, *, is_async: bool, instead: str) -> None:
        if self._is_async is not is_async:
            kind = "an async client" if self._is_async else "a client that is not async"
            raise TypeError(f"program {self.id!r} has {kind}: use {instead}")

    def _heard(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The gateway's answer to a verdict; where another attempt follows, that one's verdict has its own id."""
        self.retry = answer.get("retry")
        if self.retry is not None:
            self._verdict_id = uuid.uuid4().hex
        return answer

    def _note(self, kind: type[BaseException] | None) -> None:
        if kind is not None:
            self.artefacts.setdefault("error", kind.__name__)

    def _log_unfinished(self, problem: Exception) -> None:
        _log.warning("program_not_finished program=%s problem=%s", self.id, problem)

    def _finish_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"artefacts": {name: _as_text(value) for name, value in self.artefacts.items()}}
        if self.references:
            body["references"] = {name: _as_text(value) for name, value in self.references.items()}
        return body

    def _verdict_body(
        self,
        verdict: str,
        score: float | None,
        verifier: str | None,
        version: str | None,
        verdict_id: str | None,
        correction: bool,
        explanation: str | None,
    ) -> dict[str, Any]:
        if verdict not in _VERDICTS:
            raise ValueError(f"verdict is {verdict!r}; it must be one of {', '.join(_VERDICTS)}")
        if score is not None and not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise ValueError(f"score is {score!r}; it must be in [0, 1]")
        said = {"verdict": verdict, "score": score, "verifier": verifier, "version": version}
        said |= {"correction": correction or None, "explanation": explanation}
        return {name: value for name, value in said.items() if value is not None} | {
            "id": verdict_id or self._verdict_id
        }


def _is_label(text: str, most_chars: int) -> bool:
    """Whether a header can carry the text unchanged: servers strip the space around a value."""
    return 1 <= len(text) <= most_chars and text.isascii() and text.isprintable() and text == text.strip()


def _checked(name: str, text: str, most_chars: int) -> str:
    if not _is_label(text, most_chars):
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise ValueError(f"{name} is {shown!r}; it must have 1 to {most_chars} printable ASCII characters")
    return text


def _new_id(task: str | None) -> str:
    words = re.sub(r"[^A-Za-z0-9._]+", "-", task or "").strip("-")[:48]
    return f"{words or 'program'}-{uuid.uuid4().hex[:20]}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _status(error: Exception) -> int | None:
    """The HTTP status of an error of the SDK; None where there was no answer."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _is_worth_another_try(error: Exception) -> bool:
    from openai import APIConnectionError

    return isinstance(error, APIConnectionError) or _status(error) in _RETRIED_STATUS
