"""The gateway as OpenAI's own client meets it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from engines import DONE, Engine, chunk, fails, message, says, sends, tool_call
from sites import on_loop, site

ASK: Any = [{"role": "user", "content": "add 1 and 2"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@on_loop
async def test_a_chat_is_answered_with_what_the_engine_said() -> None:
    """A whole answer arrives as the engine gave it, with our headers beside it."""
    async with site(Engine(says(message("three")))) as s, s.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="auto", messages=ASK, extra_headers={"X-Session-ID": "p1"}
        )
        answer = raw.parse()
        assert answer.choices[0].message.content == "three"
        assert answer.usage is not None and answer.usage.prompt_tokens == 11
        assert raw.headers["x-loadwise-program"] == "p1"
        assert raw.headers["x-loadwise-model"] == "m"
        assert raw.headers["x-loadwise-backend"] == "a"
        assert raw.headers["x-loadwise-decision"] == "1"
        assert raw.headers["x-loadwise-wait-ms"] == "0"
        assert s.engine.calls[0].json["model"] == "m"


@on_loop
async def test_tools_pass_in_both_directions() -> None:
    """Tools reach the engine and its calls reach the client."""
    async with site(Engine(says(message(None, tool_calls=[tool_call()])))) as s, s.client() as client:
        answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
        calls: Any = answer.choices[0].message.tool_calls
        assert (calls[0].function.name, calls[0].function.arguments) == ("add", '{"a": 1, "b": 2}')
        assert s.engine.calls[0].json["tools"] == TOOLS


@on_loop
async def test_a_stream_hides_the_usage_that_only_we_asked_for() -> None:
    """Without include_usage the client sees no usage chunk, and the program's usage is exact all the same."""
    async with site(Engine(says(message("one two three")))) as s, s.client() as client:
        stream = await client.chat.completions.create(
            model="auto", messages=ASK, stream=True, extra_headers={"X-Session-ID": "p"}
        )
        chunks = [c async for c in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one two three"
        assert all(c.usage is None and c.choices for c in chunks)
        assert s.engine.calls[0].json["stream_options"] == {"include_usage": True}
        program = s.program("p")
        assert program is not None and (program.prompt_tokens, program.completion_tokens) == (11, 7)


@on_loop
async def test_a_stream_shows_the_usage_that_the_client_asked_for() -> None:
    """With include_usage the last chunk carries usage and no choice."""
    async with site(Engine()) as s, s.client() as client:
        stream = await client.chat.completions.create(
            model="auto", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [c async for c in stream]
        usage = chunks[-1].usage
        assert usage is not None and usage.total_tokens == 18 and not chunks[-1].choices


@on_loop
async def test_other_stream_options_survive_ours() -> None:
    """Asking for usage in the client's stead keeps what else stands in stream_options, byte for byte."""
    raw = (
        b'{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"a":1e400,"include_usage":false}}'
    )
    async with site(Engine()) as s:
        answer = await s.ask("POST", "/v1/chat/completions", raw)
        assert answer.status == 200 and b'"usage"' not in answer.body
        assert b'"stream_options":{"a":1e400,"include_usage":true}' in s.engine.calls[0].body


@on_loop
async def test_streamed_tool_calls_arrive_whole() -> None:
    """The pieces of a tool call reach the client in order."""
    async with site(Engine(says(message(None, tool_calls=[tool_call()])))) as s, s.client() as client:
        stream = await client.chat.completions.create(model="auto", messages=ASK, tools=TOOLS, stream=True)
        arguments = ""
        async for c in stream:
            for call in c.choices[0].delta.tool_calls or ():
                arguments += (call.function and call.function.arguments) or ""
        assert arguments == '{"a": 1, "b": 2}'


@on_loop
async def test_completions_and_models_are_served() -> None:
    """The older endpoint works without a program's name, and the models can be listed and looked up."""

    async def behave(call: Any) -> None:
        choice = {"index": 0, "text": "done", "finish_reason": "stop", "logprobs": None}
        await call.respond({"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})

    async with site(Engine(behave)) as s, s.client() as client:
        for _ in range(2):
            answer = await client.completions.create(model="auto", prompt="do it")
            assert answer.choices[0].text == "done"
        assert s.counts.completed == 2 and len(s.router.table.by_id) == 2
        assert [m.id async for m in client.models.list()] == ["auto", "m"]
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError, match="auto, m"):
            await client.models.retrieve("other")


@on_loop
async def test_the_synchronous_client_works_too() -> None:
    """Threads with the plain client get answers, streamed and not."""
    async with site(Engine(says(message("abcdef")))) as s:

        def ask() -> str:
            with openai.OpenAI(base_url=f"{s.gateway.url}/v1", api_key="k", max_retries=0) as client:
                whole = client.chat.completions.create(model="auto", messages=ASK).choices[0].message.content
                stream = client.chat.completions.create(model="auto", messages=ASK, stream=True)
                return f"{whole} {''.join(c.choices[0].delta.content or '' for c in stream)}"

        assert await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(3))) == ["abcdef abcdef"] * 3


@on_loop
async def test_errors_become_the_sdks_own_classes() -> None:
    """Each kind of failure is the exception that the SDK has for it, and carries our code."""
    engine = Engine()
    async with site(engine, router={"attempts_max": 1}) as s, s.client() as client:

        async def fail(kind: type[openai.APIStatusError], program: str = "", headers: Any = (), **more: Any) -> Any:
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(
                    **{"model": "auto", "messages": ASK, **more},
                    extra_headers={"X-Session-ID": program or "e", **dict(headers)},
                )
            assert type(caught.value) is kind
            return caught.value

        assert (await fail(openai.NotFoundError, model="gpt-9")).code == "model_not_found"
        bad = await fail(openai.BadRequestError, messages=[])
        assert (bad.code, bad.param) == ("invalid_value", "messages")
        unusable = await fail(openai.UnprocessableEntityError, headers={"X-Loadwise-Budget-S": "nan"})
        assert (unusable.code, unusable.param) == ("out_of_range", "X-Loadwise-Budget-S")
        await s.chat("done")
        await s.finish("done")
        assert (await fail(openai.ConflictError, program="done")).code == "program_finished"
        engine.script += [fails(429, headers="retry-after: 3\r\n")]
        limited = await fail(openai.RateLimitError)
        assert limited.response.headers["retry-after"] == "3"
    async with site(Engine(fails(500)), router={"attempts_max": 1}) as s, s.client() as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="auto", messages=ASK)


@on_loop
async def test_a_stream_that_breaks_raises_in_the_sdk() -> None:
    """A break after the first byte is an error of the SDK, not a silent end."""
    async with site(Engine(sends(chunk({"content": "par"}), then="close"))) as s, s.client() as client:
        stream = await client.chat.completions.create(model="auto", messages=ASK, stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="broke off"):
            async for c in stream:
                texts.append(c.choices[0].delta.content)
        assert texts == ["par"]


@on_loop
async def test_a_client_that_hangs_up_at_done_has_had_its_answer() -> None:
    """The SDK closes as soon as it reads [DONE]; an engine that is slow to end its body costs no usage."""
    engine = Engine(sends(chunk({"content": "all"}), DONE, then="hang"))
    async with site(engine) as s, s.client() as client:
        stream = await client.chat.completions.create(
            model="auto", messages=ASK, stream=True, extra_headers={"X-Session-ID": "p"}
        )
        assert [c.choices[0].delta.content async for c in stream] == ["all"]
        program = s.program("p")
        assert program is not None and program.n_turns == 1 and s.counts.cancelled == 0
