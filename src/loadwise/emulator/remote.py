"""A stepped emulator as an `Engine`: the world's own engine, but behind HTTP.

Whoever drives an engine can drive this one: a world whose engines are remote runs the same scenario token by token over
HTTP, and must come to the same bytes (tests/emulator/test_stepped.py). Requests become completions whose prompts have
equal text exactly where the request says that its tokens are equal; answers are read from their streams as they come.
"""

import http.client
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadwise.kernel.errors import Error, Overloaded
from loadwise.sim.engine import PREFIX_ID_TOKENS, ContextTooLong, EngineRequest, Output, Step

from .conversation import BYTES_PER_TOKEN
from .metrics import read_signals

CANCEL_LIMIT_S = 10.0
"""How long an emulator may take to notice that a client has left, while its clock stands still."""
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class RemoteFailed(Error):
    """An emulator did not answer as one that is stepped does."""

    code = "emulator_failed"


class _Told:
    """What a program has told the engine so far, as text."""

    __slots__ = ("prompt_tokens", "request_id", "shared", "text")

    def __init__(self, text: str, request: EngineRequest) -> None:
        self.text = text
        self.prompt_tokens = request.prompt_tokens
        self.request_id: int | None = request.request_id
        self.shared = (request.shared_key, request.shared_tokens)


class Writer:
    """Writes prompts: four characters a token, the same text exactly where `sim.content` has the same tokens."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}
        self._number_by_name: dict[object, int] = {}
        self._n_words = 0

    def open(self, request: EngineRequest) -> str:
        """The prompt of a request."""
        told = self._told.get(request.program_id)
        if request.prefix_ids:
            named = "".join(self._said(("block", i), PREFIX_ID_TOKENS) for i in request.prefix_ids)
            known = named[: BYTES_PER_TOKEN * request.prompt_tokens]
        elif told is None or told.shared != (request.shared_key, request.shared_tokens):
            known = self._said(("shared", request.shared_key), min(request.shared_tokens, request.prompt_tokens))
        else:
            known = told.text[: BYTES_PER_TOKEN * self._common_tokens(told, request)]
        n_fresh = request.prompt_tokens - len(known) // BYTES_PER_TOKEN
        self._n_words += 1
        text = known + _word(self._n_words) * n_fresh
        self._told[request.program_id] = _Told(text, request)
        return text

    def close(self, request: EngineRequest, said: str) -> None:
        """A request is over, and the program's context ends with this."""
        told = self._told[request.program_id]
        if told.request_id == request.request_id:
            told.request_id = None
            told.text += said

    def _common_tokens(self, told: _Told, request: EngineRequest) -> int:
        known = told.prompt_tokens if told.request_id is not None else len(told.text) // BYTES_PER_TOKEN
        common = min(known, request.prompt_tokens)
        if request.prefix_tokens is not None:
            common = min(common, max(request.prefix_tokens, request.shared_tokens))
        return common

    def _said(self, name: object, n_tokens: int) -> str:
        if name not in self._number_by_name:
            self._n_words += 1
            self._number_by_name[name] = self._n_words
        return _word(self._number_by_name[name]) * n_tokens


def _word(number: int) -> str:
    """A token's four characters: every run of fresh tokens has its own."""
    letters = []
    for _ in range(BYTES_PER_TOKEN):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)


class _Stream:
    """One request's answer, as it comes."""

    def __init__(self, request: EngineRequest, connection: http.client.HTTPConnection, answer: Any) -> None:
        self.request = request
        self.connection = connection
        self.said = ""
        self._answer = answer

    def read(self, n_tokens: int, *, is_finished: bool) -> None:
        """Read so many tokens, and the end if this is it.

        Raises:
            RemoteFailed: the stream says something else.
        """
        wanted = len(self.said) + BYTES_PER_TOKEN * n_tokens
        while len(self.said) < wanted:
            self.said += self._piece()
        if len(self.said) != wanted:
            raise RemoteFailed(f"{len(self.said)} characters came over the stream, {wanted} were announced")
        if is_finished:
            rest = self._answer.read()
            if b"data: [DONE]" not in rest:
                raise RemoteFailed(f"the stream ends with {rest[-80:]!r} and not with [DONE]")

    def leave(self) -> None:
        """Hang up in the middle."""
        self._answer.close()
        self.connection.close()

    def _piece(self) -> str:
        line = self._answer.readline()
        if not line:
            raise RemoteFailed(f"the stream broke off after {len(self.said)} characters")
        if not line.startswith(b"data: {"):
            return ""
        choices = msgspec.json.decode(line.removeprefix(b"data: "))["choices"]
        return str(choices[0]["text"]) if choices else ""


class RemoteEngine:
    """See the module. Made for one driver in one thread; a second one on the same emulator finds it restarted."""

    def __init__(self, url: str, model: str, *, timeout_s: float = 60.0) -> None:
        """
        Args:
            url: `http://host:port/v1` of a stepped emulator.
            model: The name it serves.

        Raises:
            OSError: nobody answers there.
            RemoteFailed: whoever does is not stepped.
        """
        self._host = urlsplit(url).netloc
        self._model = model
        self._timeout_s = timeout_s
        self._writer = Writer()
        self._idle: list[http.client.HTTPConnection] = []
        self._streams: dict[int, _Stream] = {}
        self._request_by_number: dict[int, int] = {}
        self.running: list[int] = []
        """Requests that the engine has let in, in its order, as of the last step."""
        try:
            self._control("POST", "/restart")
        except BaseException:
            self.close()
            raise

    def submit(self, request: EngineRequest) -> None:
        body = {
            "model": self._model,
            "prompt": self._writer.open(request),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "priority": request.priority,
            "seed": request.request_id,
        }
        connection = self._connect()
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            message = msgspec.json.decode(answer.read())["error"]["message"]
            self._idle.append(connection)
            self._writer.close(request, "")
            if answer.status == 503:
                raise Overloaded(message, retry_after_s=float(answer.headers.get("retry-after", 1.0)))
            raise ContextTooLong(message) if answer.status == 400 else RemoteFailed(f"{answer.status}: {message}")
        self._streams[request.request_id] = _Stream(request, connection, answer)
        self._request_by_number[int(answer.headers["x-request-id"])] = request.request_id

    def cancel(self, request_id: int) -> bool:
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        stream.leave()
        self._writer.close(stream.request, stream.said)
        give_up_at_s = time.monotonic() + CANCEL_LIMIT_S
        while self._control("GET", "")["n_open"] > len(self._streams):
            if time.monotonic() > give_up_at_s:
                raise RemoteFailed(f"request {request_id} still runs {CANCEL_LIMIT_S:g} s after its client left")
        return True

    def set_speed(self, ratio: float) -> None:
        self._control("POST", "/speed", {"ratio": ratio})

    def step(self, now_s: float) -> Step:
        state = self._control("POST", "/step", {"at_s": now_s})
        outputs = [self._hear(said) for said in state["said"] if said["id"] in self._request_by_number]
        self.running = [self._request_by_number.get(number, -1) for number in state.get("running", [])]
        return Step(state["due_after_s"], tuple(output for output in outputs if output is not None))

    def signals(self, now_s: float) -> dict[str, float]:
        return read_signals(self._ask("GET", f"/emulator/metrics?at_s={now_s!r}").decode())

    def check(self) -> None:
        self._control("GET", "")

    @property
    def token_due_at_s(self) -> float | None:
        """When the next token is due; None when idle."""
        due_at_s: float | None = self._control("GET", "")["token_due_at_s"]
        return due_at_s

    def close(self) -> None:
        """Leave; requests that run are given up."""
        for stream in self._streams.values():
            stream.leave()
        for connection in self._idle:
            connection.close()
        self._streams.clear()
        self._idle.clear()

    def _hear(self, said: Mapping[str, Any]) -> Output | None:
        request_id = self._request_by_number[said["id"]]
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        stream.read(said["n_new_tokens"], is_finished=said["is_finished"])
        if said["is_finished"]:
            del self._streams[request_id]
            self._idle.append(stream.connection)
            self._writer.close(stream.request, stream.said)
        return Output(request_id, said["n_new_tokens"], said["is_first"], said["is_finished"], said["cached_tokens"])

    def _control(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.json.decode(self._ask(method, "/emulator" + path, body))
        return state

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        connection = self._connect()
        connection.request(method, path, None if body is None else msgspec.json.encode(body))
        answer = connection.getresponse()
        text = answer.read()
        self._idle.append(connection)
        if answer.status != 200:
            raise RemoteFailed(f"{method} {path} of {self._host}: {answer.status} {text.decode(errors='replace')}")
        return text

    def _connect(self) -> http.client.HTTPConnection:
        return self._idle.pop() if self._idle else http.client.HTTPConnection(self._host, timeout=self._timeout_s)
