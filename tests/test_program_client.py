"""`loadwise.program`: what it sends, when it ends, and that a report is made exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

import loadwise
from loadwise import client as program_client

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "small",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


class Gateway(ThreadingHTTPServer):
    """Answers as a gateway does and keeps what it was asked; `faults` come first, a status or None for a reset."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.faults: list[int | None] = []
        self.retries: list[Any] = []
        """What verdicts lead to, one each."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def asked(self, verb: str) -> list[Any]:
        """The bodies of requests to paths that end in a word."""
        return [body for path, _, body in self.seen if path.endswith(verb)]

    def sessions(self) -> list[str | None]:
        """Which program each model call named."""
        return [headers.get("x-session-id") for path, headers, _ in self.seen if path.endswith("completions")]


class Handler(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"null")
        self.server.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status = 200
        if not self.path.endswith("completions") and self.server.faults:
            fault = self.server.faults.pop(0)
            if fault is None:
                self.close_connection = True
                return
            status = fault
        if status >= 400:
            answer: Any = {"error": {"message": "no", "type": "error", "param": None, "code": "no"}}
        else:
            answer = ANSWER if self.path.endswith("completions") else {"program": self.path.split("/")[3], "said": body}
            if self.path.endswith("verdict") and self.server.retries:
                answer = {**answer, "retry": self.server.retries.pop(0)}
        self._send(status, answer)

    def do_GET(self) -> None:
        self._send(200, {"program_id": self.path.split("/")[3], "state": "closed"})

    def _send(self, status: int, answer: Any) -> None:
        encoded = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway on loopback; reports are repeated without waiting."""
    monkeypatch.setattr(program_client, "RETRY_PAUSES_S", (0.0, 0.0))
    server = Gateway()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """The SDK's client, as an agent makes it."""
    with openai.OpenAI(base_url=gateway.url, api_key="none") as made:
        yield made


def ask(client: openai.OpenAI) -> str:
    """One turn."""
    answer = client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "2+2"}])
    return answer.choices[0].message.content or ""


def test_two_lines_make_calls_one_program_and_end_it(gateway: Gateway, client: openai.OpenAI) -> None:
    """Every call through `p.client` names the program, and leaving the block finishes it."""
    with loadwise.program(client, task="patch") as p:
        assert ask(p.client) == ask(p.client) == "4"
        assert gateway.asked("finish") == []
    assert gateway.sessions() == [p.id, p.id]
    assert gateway.asked("finish") == [{"artefacts": {}}]
    assert gateway.seen[-1][0] == f"/v1/programs/{p.id}/finish"


def test_headers_say_type_domain_and_budget(gateway: Gateway, client: openai.OpenAI) -> None:
    """What the program knows about itself travels with each call."""
    with loadwise.program(client, "a", task_type="patch", domain="retail", budget_s=90) as p:
        ask(p.client)
    headers = gateway.seen[0][1]
    assert headers["x-loadwise-task-type"] == "patch"
    assert headers["x-loadwise-domain"] == "retail"
    assert float(headers["x-loadwise-budget-s"]) == 90.0


def test_the_task_is_the_type_unless_told(gateway: Gateway, client: openai.OpenAI) -> None:
    """A short task is the task type; a long text only leads the id."""
    assert loadwise.program(client, task="patch").headers["X-Loadwise-Task-Type"] == "patch"
    long = loadwise.program(client, task="Mend the parser, please.\n" * 20)
    assert "X-Loadwise-Task-Type" not in long.headers
    assert long.id.startswith("Mend-the-parser-please.")


def test_the_client_itself_is_left_alone(gateway: Gateway, client: openai.OpenAI) -> None:
    """Calls of other threads through the same client are not credited to this program."""
    with loadwise.program(client) as p:
        ask(client)
        ask(p.client)
    assert gateway.sessions() == [None, p.id]


def test_ids_are_unique_and_a_given_one_is_used(client: openai.OpenAI) -> None:
    """Two programs of one task never share an id."""
    assert loadwise.program(client, "t").id != loadwise.program(client, "t").id
    assert loadwise.program(client, program_id="order/7 b").id == "order/7 b"


def test_an_id_is_escaped_in_the_path(gateway: Gateway, client: openai.OpenAI) -> None:
    """A slash in an id does not become another path."""
    loadwise.program(client, program_id="order/7 ?").finish()
    assert gateway.seen[-1][0] == "/v1/programs/order%2F7%20%3F/finish"


def test_artefacts_are_sent_as_strings(gateway: Gateway, client: openai.OpenAI) -> None:
    """Strings go as they are, everything else as JSON."""
    with loadwise.program(client) as p:
        p.artefacts["patch"] = "--- a\n+++ b"
        p.artefacts["files"] = ["a.py"]
    assert gateway.asked("finish") == [{"artefacts": {"patch": "--- a\n+++ b", "files": '["a.py"]'}}]


def test_an_exception_in_the_block_finishes_with_its_name(gateway: Gateway, client: openai.OpenAI) -> None:
    """A program that broke is over too, says so, and the exception goes on."""
    with pytest.raises(ZeroDivisionError), loadwise.program(client):
        1 / 0  # noqa: B018
    assert gateway.asked("finish") == [{"artefacts": {"error": "ZeroDivisionError"}}]


def test_a_program_without_an_answer_is_no_error(gateway: Gateway, client: openai.OpenAI) -> None:
    """404 at the end means that there is nothing to finish."""
    gateway.faults = [404]
    with loadwise.program(client) as p:
        pass
    gateway.faults = [404]
    assert p.finish() is None


def test_an_end_that_cannot_be_told_is_logged_not_raised(
    gateway: Gateway, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent keeps its result when the gateway has gone; asking for the finish itself raises."""
    gateway.faults = [None, None, None]
    with caplog.at_level(logging.WARNING, "loadwise.client"), loadwise.program(client) as p:
        result = "kept"
    assert result == "kept"
    assert p.id in caplog.text
    gateway.faults = [401]
    with pytest.raises(openai.AuthenticationError):
        p.finish()


def test_a_verdict_comes_back_as_a_dict(gateway: Gateway, client: openai.OpenAI) -> None:
    """Before or after the end, with all that a verifier knows."""
    with loadwise.program(client) as p:
        before = p.verdict("pass", 0.75, verifier="tests", version="3", verdict_id="v-1")
    assert before["said"] == {"verdict": "pass", "score": 0.75, "verifier": "tests", "version": "3", "id": "v-1"}
    assert p.verdict("abstain")["program"] == p.id


def test_another_attempt_is_shown_and_its_verdict_has_an_id_of_its_own(gateway: Gateway, client: openai.OpenAI) -> None:
    """`retry` says where it runs; the program's id stays, and so does the outcome that the gateway tells."""
    gateway.retries = [{"model": "large", "attempt": 2}]
    p = loadwise.program(client)
    p.verdict("fail")
    assert p.retry == {"model": "large", "attempt": 2}
    ask(p.client)
    p.verdict("pass")
    assert p.retry is None
    first, second = gateway.asked("verdict")
    assert first["id"] != second["id"]
    assert gateway.sessions() == [p.id]
    assert p.outcome() == {"program_id": p.id, "state": "closed"}


def test_the_same_verdict_twice_has_the_same_id(gateway: Gateway, client: openai.OpenAI) -> None:
    """Repeating a verdict is no second verdict; another program's has another id."""
    p, q = loadwise.program(client), loadwise.program(client)
    p.verdict("pass")
    p.verdict("pass")
    q.verdict("pass")
    first, again, other = gateway.asked("verdict")
    assert first == again
    assert first["id"] != other["id"]


@pytest.mark.parametrize("faults", [[None], [503], [None, 502]], ids=["reset", "overloaded", "both"])
def test_a_report_that_did_not_arrive_is_repeated_unchanged(
    gateway: Gateway, client: openai.OpenAI, faults: list[int | None]
) -> None:
    """The same body until the gateway has it."""
    gateway.faults = list(faults)
    loadwise.program(client).verdict("fail")
    bodies = gateway.asked("verdict")
    assert len(bodies) == len(faults) + 1
    assert all(body == bodies[0] for body in bodies)


def test_repeating_has_an_end(gateway: Gateway, client: openai.OpenAI) -> None:
    """A gateway that is gone becomes the SDK's own error."""
    gateway.faults = [None] * 10
    with pytest.raises(openai.APIConnectionError):
        loadwise.program(client).verdict("pass")
    assert len(gateway.asked("verdict")) == 3


@pytest.mark.parametrize("status", [404, 409, 422])
def test_a_refused_verdict_is_raised_at_once(gateway: Gateway, client: openai.OpenAI, status: int) -> None:
    """What the gateway refuses it would refuse again."""
    gateway.faults = [status]
    with pytest.raises(openai.APIStatusError) as refused:
        loadwise.program(client).verdict("pass")
    assert refused.value.status_code == status
    assert len(gateway.asked("verdict")) == 1


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"program_id": "x" * 257}, "program_id"),
        ({"program_id": "a\r\nX-Evil: 1"}, "program_id"),
        ({"program_id": "größe"}, "program_id"),
        ({"program_id": " a"}, "program_id"),
        ({"task_type": ""}, "task_type"),
        ({"domain": "d" * 129}, "domain"),
        ({"budget_s": 0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"budget_s": float("inf")}, "budget_s"),
    ],
)
def test_what_a_header_cannot_carry_is_refused_by_name(client: openai.OpenAI, said: Any, named: str) -> None:
    """The error names the argument before anything is sent."""
    with pytest.raises(ValueError, match=named):
        loadwise.program(client, **said)


@pytest.mark.parametrize("said", [("passed", None), ("pass", 1.5), ("pass", -0.1), ("pass", float("nan"))])
def test_an_impossible_verdict_is_refused_here(gateway: Gateway, client: openai.OpenAI, said: Any) -> None:
    """Nothing is sent that cannot be a verdict."""
    with pytest.raises(ValueError, match=r"verdict is|score is"):
        loadwise.program(client).verdict(*said)
    assert gateway.seen == []


def test_other_clients_are_refused() -> None:
    """What is no client of the SDK is named."""
    with pytest.raises(TypeError, match="dict"):
        loadwise.program({})


def test_sync_and_async_are_not_mixed_up(gateway: Gateway, client: openai.OpenAI) -> None:
    """The wrong kind of `with` says which one is right."""
    p = loadwise.program(client)
    for wrong in (p.__aenter__, p.afinish, lambda: p.averdict("pass")):
        with pytest.raises(TypeError, match="not async"):
            asyncio.run(wrong())

    async def wrong_way_round() -> None:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as made:
            p = loadwise.program(made)
            with pytest.raises(TypeError, match="async with"):
                p.__enter__()
            with pytest.raises(TypeError, match=r"await p\.averdict"):
                p.verdict("pass")
            with pytest.raises(TypeError, match=r"await p\.afinish"):
                p.finish()

    asyncio.run(wrong_way_round())


def test_the_same_with_an_async_client(gateway: Gateway) -> None:
    """`async with`, `averdict`, repeats and tolerance as with the other client."""

    async def run() -> tuple[str, dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as made:
            with pytest.raises(KeyError):
                async with loadwise.program(made, task="patch") as p:
                    await p.client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "2+2"}])
                    raise KeyError
            gateway.faults = [None, 404]
            assert await p.afinish() is None
            gateway.faults = [None, 503]
            return p.id, await p.averdict("pass", 1.0)

    program_id, answer = asyncio.run(run())
    assert gateway.sessions() == [program_id]
    assert gateway.asked("finish")[0] == {"artefacts": {"error": "KeyError"}}
    assert answer["program"] == program_id
    assert len(gateway.asked("verdict")) == 3


def test_an_async_end_that_cannot_be_told_is_logged(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """As with the other client."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as made, loadwise.program(made):
            gateway.faults = [500]

    with caplog.at_level(logging.WARNING, "loadwise.client"):
        asyncio.run(run())
    assert "program_not_finished" in caplog.text
