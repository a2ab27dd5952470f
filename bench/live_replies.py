"""What comes back to an agent over HTTP: a whole answer, and what a turn brought."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec


class Answer(NamedTuple):
    """One HTTP answer, whole."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Reply(NamedTuple):
    """What a turn brought; no text where it failed."""

    text: str
    output_tokens: int
    model: str
    wait_s: float
    """Seconds of the world that the gateway held it; 0 where nobody says so."""
    code: str
    """Of a failure."""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class AnswerSink:
    """Hears one answer until it is whole."""

    def __init__(self) -> None:
        self.over: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status, self._headers, self._body = 0, dict[bytes, bytes](), list[bytes]()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self) -> None:
        if not self.over.done():
            self.over.set_result(Answer(self._status, self._headers, b"".join(self._body)))

    def on_error(self, kind: str, detail: str) -> None:
        if not self.over.done():
            self.over.set_result(Answer(0, {}, f"{kind}: {detail}".encode()))


def read_reply(answer: Answer, model: str, *, is_stream: bool) -> Reply:
    """What an answer says; of one that is no answer, why."""
    wait_s = float(answer.headers.get(b"x-loadwise-wait-ms", b"0")) / 1000.0
    ran = answer.headers.get(b"x-loadwise-model", model.encode()).decode()
    if answer.status != 200:
        return Reply("", 0, ran, wait_s, _code_of(answer))
    try:
        text, usage = _streamed(answer.body) if is_stream else _whole(answer.body)
        cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        return Reply(text, int(usage["completion_tokens"]), ran, wait_s, "", int(usage["prompt_tokens"]), cached_tokens)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as problem:
        return Reply("", 0, ran, wait_s, f"unreadable: {problem!r}")


def _whole(body: bytes) -> tuple[str, Mapping[str, Any]]:
    said = msgspec.json.decode(body)
    return str(said["choices"][0]["message"]["content"]), said["usage"]


def _streamed(body: bytes) -> tuple[str, Mapping[str, Any]]:
    text, usage = list[str](), dict[str, Any]()
    for line in body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        chunk = msgspec.json.decode(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise ValueError(chunk["error"].get("code") or chunk["error"].get("message"))
        text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        usage.update(chunk.get("usage") or {})
    return "".join(text), usage


def _code_of(answer: Answer) -> str:
    try:
        error = msgspec.json.decode(answer.body)["error"]
        return str(error.get("code") or answer.status)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return f"{answer.status}: {answer.body[:200].decode(errors='replace')}"
