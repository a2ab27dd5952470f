"""The ground under every bench: the stub is like an engine, load counts honestly, reports keep the schema."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
import uvloop

from bench import pinned
from bench.engine_stub import STREAM_CHUNKS, Stub
from bench.http_stack import load
from loadwise.wire.client import Answer, Upstream
from loadwise.wire.exchange import Exchange
from loadwise.wire.server import Server


def asked(handler: Stub, *requests: tuple[bytes, str, bytes]) -> list[Answer]:
    """Answers of a server with this handler, one after the other."""

    async def run() -> list[Answer]:
        server = Server(handler)
        ((host, port),) = await server.listen()
        upstream = Upstream(f"http://{host}:{port}")
        answers = [await upstream.fetch(method, path, body=body) for method, path, body in requests]
        await upstream.close()
        await server.close()
        return answers

    return uvloop.run(run())


@pytest.mark.parametrize("is_spread", [False, True])
def test_the_stub_streams_chunks_then_usage_then_done(is_spread: bool) -> None:
    """A streamed answer is what OpenAI clients expect, whether or not its chunks leave together."""
    (answer,) = asked(Stub(is_spread=is_spread), (b"POST", "/v1/chat/completions", load.body(stream=True)))
    events = answer.body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""] and answer.headers[b"content-type"].startswith(b"text/event-stream")
    pieces = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert len(pieces) == STREAM_CHUNKS + 1
    assert all(piece["choices"][0]["delta"]["content"] for piece in pieces[:-1])
    assert pieces[-2]["choices"][0]["finish_reason"] == "stop"
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["total_tokens"] == 136


def test_the_stub_answers_every_route_of_an_engine() -> None:
    """Completions with usage, models, metrics, health, and an error in OpenAI's shape for the rest."""
    complete, models, metrics, health, unknown = asked(
        Stub(),
        (b"POST", "/v1/chat/completions", load.body()),
        (b"GET", "/v1/models", b""),
        (b"GET", "/metrics", b""),
        (b"GET", "/health", b""),
        (b"GET", "/nowhere", b""),
    )
    usage = json.loads(complete.body)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert 300 <= len(complete.body) <= 500
    assert json.loads(models.body)["data"][0]["id"] == json.loads(complete.body)["model"]
    assert b"vllm:num_requests_running{" in metrics.body
    assert (health.status, unknown.status) == (200, 404) and json.loads(unknown.body)["error"]["code"] == "not_found"


@pytest.mark.parametrize("fails", [False, True])
def test_load_counts_only_good_answers(fails: bool) -> None:
    """What is not 200 is an error; sessions are sent in turn."""
    seen: list[bytes] = []

    def handler(exchange: Exchange) -> None:
        seen.append(exchange.headers[b"x-session-id"])
        exchange.respond(500 if fails else 200)

    async def run() -> load.Load:
        server = Server(handler)
        ((host, port),) = await server.listen()
        options = load.arguments().parse_args(["--connections", "2", "--seconds", "0.1", "--sessions", "2", "url"])
        options.url = f"http://{host}:{port}/v1/chat/completions"
        done = await load.generate(b"{}", options)
        await server.close()
        return done

    done = uvloop.run(run())
    assert done.requests == len(seen) and done.errors == (len(seen) if fails else 0)
    assert set(seen) == {b"bench-0", b"bench-1"}
    assert (done.rps == 0) == fails and (done.p50_ms is None) == fails


def test_the_load_script_carries_the_body_byte_for_byte() -> None:
    """What wrk sends is the payload, whatever its bytes."""
    payload = msgspec.json.encode({"text": 'quote " back \\ line \n end ]] é'})
    script = load.script(payload, sessions=2)
    quoted = script.split('h, "')[1].split('")')[0]
    assert bytes(int(code) for code in quoted.split("\\")[1:]) == payload
    assert script.count("X-Session-ID") == 2


def test_asyncio_runs_the_http_layer_too() -> None:
    """uvloop is faster, not needed."""

    async def run() -> Answer:
        server = Server(Stub())
        ((host, port),) = await server.listen()
        upstream = Upstream(f"http://{host}:{port}")
        answer = await upstream.fetch(b"POST", "/v1/chat/completions", body=load.body(stream=True))
        await upstream.close()
        await server.close()
        return answer

    assert asyncio.run(run()).body.endswith(b"data: [DONE]\n\n")


def test_children_start_in_the_root_of_the_repository() -> None:
    """Where `pinned` lives may change; candidates are still found from the root, with this tree on their path."""
    assert (pinned.ROOT / "pyproject.toml").exists()
    assert str(pinned.ROOT / "src") in pinned.environment()["PYTHONPATH"]
