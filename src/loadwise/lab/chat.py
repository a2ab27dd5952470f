"""A chat endpoint that a language-model orchestrator asks, one question at a time, and the record of what it said."""

import http.client
import json
import math
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.policy.orchestrator import Recorded

ANSWER_MAX_TOKENS = 32
"""A decision is a short JSON object."""
REPLY_MAX_BYTES = 1 << 20
TOKENS_MAX = 1_000_000_000
ANSWERS_MAX_BYTES = 64 << 20


class Asked(NamedTuple):
    """One answer, and what it took."""

    answer: str
    seconds: float
    prompt_tokens: int | None
    completion_tokens: int | None


class Chat:
    """Asks `POST URL/chat/completions` at temperature zero. Calling it returns the answer's text.

    Raises:
        ConfigError: the URL is none that is spoken here, or, from a call, the endpoint gave no whole answer in time.
    """

    def __init__(self, url: str, model: str, *, key: str | None = None, timeout_s: float = 120.0) -> None:
        wrong = f"url is {url!r}; it must be http://HOST[:PORT]/PATH or https://…"
        try:
            parts = urllib.parse.urlsplit(url)
            is_host = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ConfigError(f"{wrong} ({error})") from error
        if parts.scheme not in ("http", "https") or not is_host:
            raise ConfigError(wrong)
        if not (math.isfinite(timeout_s) and timeout_s > 0.0):
            raise ConfigError(f"timeout_s is {timeout_s!r}; it must be a finite number > 0")
        self.url, self.model = url.rstrip("/"), model
        self._parts, self._key, self._timeout_s = parts, key, timeout_s
        self.asked: list[Asked] = []

    def __call__(self, prompt: str) -> str:
        begin = time.perf_counter()
        said = self._post("/chat/completions", self._question(prompt))
        try:
            answer = said["choices"][0]["message"].get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.url}: an answer without choices[0].message") from error
        usage = said.get("usage")
        counts = (_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))
        self.asked.append(Asked(str(answer), time.perf_counter() - begin, *counts))
        return str(answer)

    def is_emulated(self) -> bool:
        """Whether an emulated engine answers: its words are no decision of a language model.

        An endpoint that lists no models is none of ours.
        """
        try:
            listed = self._request("GET", "/models", None).get("data")
        except ConfigError:
            return False
        return isinstance(listed, list) and any(
            isinstance(one, dict) and one.get("owned_by") == "loadwise" for one in listed
        )

    def _question(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": ANSWER_MAX_TOKENS,
        }

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._request("POST", path, json.dumps(body).encode())

    def _request(self, method: str, path: str, body: bytes | None) -> Any:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        connection = kind(str(parts.hostname), parts.port, timeout=self._timeout_s)
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            with connection.getresponse() as response:
                read = self._read(response, time.perf_counter() + self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{self.url}{path}: no answer: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ConfigError(f"{self.url}{path}: status {response.status}: {read[:200].decode(errors='replace')}")
        try:
            said = msgspec.json.decode(read)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ConfigError(f"{self.url}{path}: not JSON: {error}") from error
        if not isinstance(said, dict):
            raise ConfigError(f"{self.url}{path}: not a JSON object")
        return said

    def _read(self, response: http.client.HTTPResponse, ends_at_s: float) -> bytes:
        """The whole body; one that comes drop by drop is out of time, too."""
        read = bytearray()
        while len(read) < REPLY_MAX_BYTES and (chunk := response.read1(REPLY_MAX_BYTES - len(read))):
            read += chunk
            if time.perf_counter() > ends_at_s:
                raise TimeoutError(f"not whole after {self._timeout_s:g} s")
        return bytes(read)


def _count(usage: Any, name: str) -> int | None:
    """A number of tokens as an endpoint reports it; None where it reports none, or nonsense."""
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int and 0 <= found <= TOKENS_MAX else None


def remembering(ask: Callable[[str], str], answers: dict[str, str]) -> Callable[[str], str]:
    """Asks each prompt once; `answers` grows, by the prompt's hash."""

    def asked(prompt: str) -> str:
        key = Recorded.key(prompt)
        if key not in answers:
            answers[key] = ask(prompt)
        return answers[key]

    return asked


def read_answers(path: str) -> dict[str, str]:
    """Answers recorded before: one JSON object, hash of the prompt to answer.

    Raises:
        ConfigError: the file cannot be read, is too large, or is something else.
    """
    try:
        if Path(path).stat().st_size > ANSWERS_MAX_BYTES:
            raise ConfigError(f"answers {path!r} are larger than {ANSWERS_MAX_BYTES} bytes")
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, str])
    except OSError as error:
        raise ConfigError(f"answers {path!r} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"answers {path!r} are not an object of strings: {error}") from error
