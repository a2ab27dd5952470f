"""Servers under test, asked in token ids, so that prompts are equal exactly where they are meant to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from bench.agents import Answered, Events, Script, Turn
from bench.judges.tiny_model import FIRST_WORD, VOCABULARY
from loadwise.wire.client import Timeouts, Upstream

PATIENT = Timeouts(connect_s=1800.0, first_byte_s=1800.0, idle_s=1800.0)
"""What an engine found is asked, not how fast: on a busy machine a token may take a minute."""

JSON_HEAD = b"content-type: application/json\r\n"


class Contexts:
    """What each program has said and heard, as token ids."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._ids: dict[int, list[int]] = {}
        self._shared: list[int] = []

    def grow(self, program: int, turn: Turn, script: Script) -> list[int]:
        """The prompt of a program's next turn."""
        known = self._ids.get(program)
        if known is None:
            if len(self._shared) != script.shared_tokens:
                self._shared = self._fresh(script.shared_tokens)
            known = list(self._shared)
        n_more = turn.growth_tokens - (0 if program in self._ids else script.shared_tokens)
        self._ids[program] = known + self._fresh(n_more)
        return self._ids[program]

    def reply(self, program: int, ids: list[int]) -> None:
        """An answer becomes part of the context."""
        self._ids[program] = self._ids[program] + ids

    def _fresh(self, n: int) -> list[int]:
        return [int(i) for i in self._rng.integers(FIRST_WORD, VOCABULARY, n)]


class OpenAIEndpoint:
    """`/v1/completions` of vLLM and Dynamo."""

    def __init__(
        self,
        url: str,
        read: Callable[[str], Mapping[str, float]],
        *,
        metrics_url: str | None = None,
        has_token_ids: bool = True,
        seed: int = 0,
    ) -> None:
        """
        Args:
            read: Readings out of a page of metrics.
            metrics_url: Where the page is, if not beside `url`.
            has_token_ids: The server gives back ids (`return_token_ids`); else they are read from its words.
        """
        self._upstream = Upstream(url, timeouts=PATIENT)
        self._metrics = Upstream(metrics_url, timeouts=PATIENT) if metrics_url else self._upstream
        self._read = read
        self._has_token_ids = has_token_ids
        self._contexts = Contexts(seed)

    async def ask(self, program: int, turn: Turn, script: Script, hear: Callable[[int], None]) -> Answered:
        body: dict[str, Any] = {
            "model": "m",
            "prompt": self._contexts.grow(program, turn, script),
            "max_tokens": turn.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._has_token_ids:
            body["return_token_ids"] = True
        said: list[int] = []
        usage: dict[str, Any] = {}

        def on_event(data: bytes) -> None:
            chunk = msgspec.json.decode(data)
            for choice in chunk["choices"]:
                ids = (choice.get("token_ids") or []) if self._has_token_ids else _ids_of(choice["text"])
                said.extend(ids)
                hear(len(ids))
            usage.update(chunk.get("usage") or {})

        events = Events(on_event)
        self._upstream.send(b"POST", b"/completions", JSON_HEAD, msgspec.json.encode(body), events)
        await events.over
        if script.keeps_replies:
            self._contexts.reply(program, said)
        details = usage.get("prompt_tokens_details") or {}
        return Answered(usage["prompt_tokens"], details.get("cached_tokens") or 0)

    async def signals(self) -> Mapping[str, float]:
        return self._read((await self._metrics.get("/metrics", from_root=True, timeout_s=PATIENT.idle_s)).body.decode())

    async def close(self) -> None:
        """Hang up."""
        await self._upstream.close()
        if self._metrics is not self._upstream:
            await self._metrics.close()


class LlamaEndpoint:
    """llama.cpp's own `/completion`, which takes and gives token ids."""

    def __init__(self, url: str, *, seed: int = 0) -> None:
        self._upstream = Upstream(url.removesuffix("/v1"), timeouts=PATIENT)
        self._contexts = Contexts(seed)

    async def ask(self, program: int, turn: Turn, script: Script, hear: Callable[[int], None]) -> Answered:
        prompt = self._contexts.grow(program, turn, script)
        body = {
            "prompt": prompt,
            "n_predict": turn.output_tokens,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "temperature": 0.0,
            "stream": True,
        }
        said: list[int] = []
        last: dict[str, Any] = {}

        def on_event(data: bytes) -> None:
            chunk = msgspec.json.decode(data)
            ids = chunk.get("tokens") or []
            if not chunk.get("stop"):
                said.extend(ids)
                hear(len(ids))
            else:
                last.update(chunk)

        events = Events(on_event)
        self._upstream.send(b"POST", b"/completion", JSON_HEAD, msgspec.json.encode(body), events)
        await events.over
        if script.keeps_replies:
            self._contexts.reply(program, said)
        timings = last.get("timings", {})
        return Answered(len(prompt), int(timings.get("cache_n", 0)))

    async def signals(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        """Hang up."""
        await self._upstream.close()


def _ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split() if word[1:].isdigit()]
