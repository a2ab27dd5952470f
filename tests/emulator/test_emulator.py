"""The emulated engine over loopback: answers, streams, usage, limits, disconnects and metrics."""

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from loadwise.emulator.backend import EmulatedBackendSpec
from loadwise.emulator.emulator import EmulatorSpec, spec_from_scenario, start_emulator
from loadwise.emulator.main import EmulateOptions, emulate, emulator_spec
from loadwise.emulator.script import Reply, ToolCall
from loadwise.kernel.errors import ConfigError
from loadwise.sim.scenario import load_scenario
from loadwise.sim.servers_engine import ServersEngineSpec
from loadwise.sim.simple_engine import SimpleEngineSpec

from .loopback import LIMIT_S, chat, on_loop, running, says

ROOT = Path(__file__).parents[2]


@on_loop
async def test_plain_answer_says_the_script_and_counts_tokens() -> None:
    """Text, finish reason and usage of an answer that is not streamed; prompt tokens by the stated rule."""
    async with running(says("forty-two", 7)) as client:
        answer = (await client.ask(chat("12345"))).json
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "forty-two"}
    assert choice["finish_reason"] == "stop"
    # "user", a separator and five characters are ten bytes: three tokens.
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["object"] == "chat.completion" and answer["model"] == "m"


@on_loop
async def test_stream_is_the_plain_answer_in_pieces() -> None:
    """Role first, then text that adds up, one reason, usage only when asked for, [DONE] at the end."""
    text = "one two three four five six seven eight nine ten"
    async with running(says(text, 12)) as client:
        asked = await client.ask(chat("x", stream=True, stream_options={"include_usage": True}))
        plain = await client.ask(chat("y", stream=True))
    assert asked.headers[b"content-type"].startswith(b"text/event-stream")
    assert asked.body.endswith(b"data: [DONE]\n\n")
    *chunks, last = asked.chunks
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert all("usage" not in chunk for chunk in plain.chunks)


@on_loop
async def test_the_openai_sdk_works_unchanged() -> None:
    """Models, plain, streamed and tool calls through the official client."""
    call = ToolCall(name="add", arguments='{"a":1}')

    def script(body: Any) -> Reply:
        return Reply(tool_calls=(call, call)) if body.get("tools") else Reply(text="hello there", output_tokens=4)

    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    ask: Any = [{"role": "user", "content": "hi"}]
    async with (
        running(script) as client,
        openai.AsyncOpenAI(base_url=client.backend.url, api_key="none", max_retries=0) as sdk,
    ):
        assert [model.id async for model in sdk.models.list()] == ["m"]
        plain = await sdk.chat.completions.create(model="m", messages=ask)
        assert plain.choices[0].message.content == "hello there"
        called = await sdk.chat.completions.create(model="m", messages=ask, tools=tools)
        assert called.choices[0].finish_reason == "tool_calls"
        found = called.choices[0].message.tool_calls or []
        assert [(c.function.name, c.function.arguments) for c in found] == [("add", '{"a":1}')] * 2  # type: ignore[union-attr]
        assert len({c.id for c in found}) == 2
        arguments: dict[int, str] = {}
        async for chunk in await sdk.chat.completions.create(model="m", messages=ask, tools=tools, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                assert delta.function is not None
                arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
        assert arguments == {0: '{"a":1}', 1: '{"a":1}'}
        old = await sdk.completions.create(model="m", prompt="once upon")
        assert old.choices[0].text == "hello there"
        text = ""
        async for piece in await sdk.completions.create(model="m", prompt="once upon", stream=True):
            text += piece.choices[0].text
        assert text == "hello there"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await sdk.chat.completions.create(model="other", messages=ask)


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_limits_and_stops_are_honoured(is_stream: bool) -> None:
    """`max_tokens` cuts with reason `length`, a stop string cuts before itself with reason `stop`."""

    async def ask(**fields: Any) -> tuple[str, str, int]:
        body = chat("x", stream=is_stream, **fields)
        if not is_stream:
            answer = (await client.ask(body)).json
            choice = answer["choices"][0]
            return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]
        chunks = (await client.ask(body | {"stream_options": {"include_usage": True}})).chunks
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        return text, choices[-1]["finish_reason"], chunks[-1]["usage"]["completion_tokens"]

    async with running(says("abcdefghijklmnopqrst", 10)) as client:
        assert await ask(max_tokens=4) == ("abcdefgh", "length", 4)
        assert await ask(max_completion_tokens=4, max_tokens=9) == ("abcdefgh", "length", 4)
        assert await ask(max_tokens=10) == ("abcdefghijklmnopqrst", "stop", 10)
        assert await ask(stop="k") == ("abcdefghij", "stop", 5)
        assert await ask(stop=["zz", "e", "c"]) == ("ab", "stop", 1)


@pytest.mark.parametrize(
    ("body", "status", "param", "says_what"),
    [
        (b"{", 400, None, "not JSON"),
        (b"[]", 400, None, "not an object"),
        (b"\xff\xfe", 400, None, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None, "not JSON"),
        (b"[" * 100_000, 400, None, "not JSON"),
        (chat("x", n=2), 400, "n", "n is 2"),
        (chat("x", model="zz"), 404, "model", "Valid aliases: m"),
        (chat("x", model=3), 404, "model", "does not exist"),
        ({"model": "m"}, 400, "messages", "list of at least one"),
        ({"model": "m", "messages": []}, 400, "messages", "list of at least one"),
        ({"model": "m", "messages": ["x"]}, 400, "messages", "messages[0]"),
        ({"model": "m", "messages": [{"role": "user", "content": 3}]}, 400, "messages", "messages[0].content"),
        ({"model": "m", "messages": [{"role": "user", "tool_calls": 3}]}, 400, "messages", "messages[0].tool_calls"),
        (chat("x", stream="yes"), 400, "stream", "stream is 'yes'"),
        (chat("x", stream_options={"include_usage": True}), 400, "stream_options", "only allowed"),
        (chat("x", stream=True, stream_options=3), 400, "stream_options", "must be an object"),
        (chat("x", stream=True, stream_options={"include_usage": 1}), 400, "include_usage", "true or false"),
        (chat("x", max_tokens=0), 400, "max_tokens", "max_tokens is 0"),
        (chat("x", max_tokens=1.5), 400, "max_tokens", "max_tokens is 1.5"),
        (chat("x", max_completion_tokens=True), 400, "max_completion_tokens", "is True"),
        (chat("x", stop=3), 400, "stop", "stop must be"),
        (chat("x", stop=["a", 3]), 400, "stop", "stop must be"),
        (chat("x" * 4000), 400, "messages", "maximum context length is 500"),
    ],
)
@on_loop
async def test_bad_requests_are_told_what_is_wrong(body: Any, status: int, param: str | None, says_what: str) -> None:
    """Each bad body gets its status, an OpenAI-shaped error and the field's name; the engine stays untouched."""
    async with running(says("x", 10), context_tokens=500) as client:
        answer = await client.ask(body)
        assert answer.status == status
        error = answer.json["error"]
        assert error["param"] == param and error["code"] == status
        assert says_what in error["message"]
        assert client.backend.driver.n_open == 0
        assert (await client.ask(chat("still well"))).status == 200


@on_loop
async def test_unknown_paths_are_404_and_health_is_up() -> None:
    """Other paths and methods are refused; health is empty; completions refuse token lists."""
    async with running() as client:
        assert await client.get("/health") == b""
        assert (await client.ask({}, b"/embeddings")).status == 404
        assert (await client.upstream.get("/nothing", from_root=True)).status == 404
        assert (await client.ask({"prompt": [1, 2]}, b"/completions")).json["error"]["param"] == "prompt"


@on_loop
async def test_later_turns_hit_the_prefix_cache() -> None:
    """A conversation that goes on finds its context, also rewritten by its client; a foreign one finds nothing."""
    question, follow = "word " * 200, "and then?"
    async with running(says("  the answer ", 5)) as client:
        first = (await client.ask(chat(question))).json["usage"]
        second = (await client.ask(chat(question + " \n", "the answer", follow))).json["usage"]
        foreign = (await client.ask(chat("other " * 200))).json["usage"]
        again = (await client.ask(chat(question))).json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["prompt_tokens"] <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert foreign["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


@on_loop
async def test_completions_hit_by_their_text() -> None:
    """A prompt that goes on with an earlier prompt and its answer finds both, to within one block."""
    async with running(says("tail " * 40, 50)) as client:
        prompt = "head " * 100
        first = (await client.ask({"model": "m", "prompt": prompt}, b"/completions")).json
        longer = prompt + first["choices"][0]["text"] + "more and more"
        second = (await client.ask({"model": "m", "prompt": longer}, b"/completions")).json["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= (500 + 200 - 64) // 4 - 16


async def settled(client: Any) -> None:
    """Until the server has noticed what its client did."""
    async with asyncio.timeout(LIMIT_S):
        while client.backend.driver.n_open:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_a_client_that_leaves_frees_the_engine(is_stream: bool) -> None:
    """Disconnect cancels the request: slot and KV are free at once, and the metrics say abort."""
    engine = SimpleEngineSpec(slots=1, decode_steps_per_s=1.0)
    async with running(says("x" * 4000, 1000), engine=engine, scale=20) as client:
        answer = client.send(chat("y" * 4000, stream=is_stream))
        if is_stream:
            await asyncio.wait_for(answer.begun, LIMIT_S)
        else:
            while client.backend.driver.signals()["n_running"] == 0:
                await asyncio.sleep(0.002)
        assert client.backend.driver.signals()["kv_usage_ratio"] > 0
        assert answer.attempt is not None
        answer.attempt.cancel()
        await settled(client)
        signals = client.backend.driver.signals()
        assert signals["n_running"] == signals["kv_usage_ratio"] == 0
        client.backend.driver.engine.check()
        page = (await client.get("/metrics")).decode()
        assert re.search(r'request_success_total\{[^}]*"abort"[^}]*\} 1.0', page)


@on_loop
async def test_a_full_queue_is_503_with_retry_after() -> None:
    """More requests than slots and queue: the last is told to come back."""
    engine = SimpleEngineSpec(slots=1, max_waiting=1, decode_steps_per_s=1.0)
    async with running(says("x", 100_000), engine=engine, scale=1) as client:
        answers = [client.send(chat(f"{i}")) for i in range(3)]
        done, _ = await asyncio.wait([a.over for a in answers], return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
        assert len(done) == 1
        (refused,) = [a for a in answers if a.over.done()]
        assert refused.status == 503 and refused.headers[b"retry-after"] == b"1"


def test_metric_names_and_labels_are_vllms() -> None:
    """Every sample that the emulator exports has a name and label names that vLLM 0.32 exports too."""
    found = asyncio.run(scrape())
    recorded = samples((Path(__file__).parent / "vllm_metrics_0_32.txt").read_text(encoding="utf-8"))
    for name, labels in found:
        known = [other for known_name, other in recorded if known_name == name]
        assert known, f"vLLM has no {name}"
        if name != "vllm:cache_config_info":
            assert labels in known, f"{name} has labels {sorted(labels)}, vLLM {[sorted(k) for k in known]}"
        else:
            assert labels <= known[0]
    names = {name for name, _ in found}
    for needed in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert f"vllm:{needed}" in names
    for needed in ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"):
        assert f"vllm:{needed}" in names


async def scrape() -> set[tuple[str, frozenset[str]]]:
    async with running() as client:
        await client.ask(chat("x", max_tokens=3))
        return samples((await client.get("/metrics")).decode())


def samples(page: str) -> set[tuple[str, frozenset[str]]]:
    """Name and label names of each sample."""
    found = set()
    for line in page.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9_:]+)(?:\{(.*)\})? \S+", line)
            assert match, line
            found.add((match[1], frozenset(re.findall(r'(\w+)="', match[2] or ""))))
    return found


@on_loop
async def test_metrics_count_what_happened() -> None:
    """Tokens, hits and finished requests add up over two calls of one conversation."""
    async with running(says("ok", 5)) as client:
        usages = [(await client.ask(chat("x" * 400))).json["usage"] for _ in range(2)]
        page = (await client.get("/metrics")).decode()

    def value(name: str) -> float:
        return float(re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", page, re.M)[1])  # type: ignore[index]

    assert value("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert value("generation_tokens_total") == 10
    assert value("prefix_cache_hits_total") == usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
    assert value("time_to_first_token_seconds_count") == value("e2e_request_latency_seconds_count") == 2
    assert value("kv_cache_usage_perc") == 0.0
    assert 'num_gpu_blocks="12500"' in page


@on_loop
async def test_servers_engines_can_be_emulated_too() -> None:
    """An M/M/k station behind HTTP answers; it exports no KV capacity because it has none."""
    async with running(says("x", 3), engine=ServersEngineSpec(mean_service_s=0.1)) as client:
        assert (await client.ask(chat("x"))).json["usage"]["completion_tokens"] == 3
        assert b"cache_config_info" not in await client.get("/metrics")


@on_loop
async def test_many_backends_share_a_process() -> None:
    """Each backend has a port of its own and serves its own model, with its own script."""
    spec = EmulatorSpec(backends=tuple(EmulatedBackendSpec(name=n, model=f"model-{n}") for n in "abc"), scale=200.0)
    handle = await start_emulator(spec, script={"model-a": says("from a"), "model-b": says("from b")})
    try:
        assert len(set(handle.urls.values())) == 3 and handle.url == handle.urls["a"]
        for name, expected in (("a", "from a"), ("b", "from b")):
            async with openai.AsyncOpenAI(base_url=handle.urls[name], api_key="x", max_retries=0) as sdk:
                ask: Any = [{"role": "user", "content": "hi"}]
                answer = await sdk.chat.completions.create(model=f"model-{name}", messages=ask)
                assert answer.choices[0].message.content == expected
    finally:
        await handle.close()


@on_loop
async def test_a_taken_port_leaves_nothing_behind() -> None:
    """When one backend cannot listen, the error is told and the others are closed again."""
    first = await start_emulator(EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m"),)))
    port = int(first.url.split(":")[2].split("/")[0])
    two = (EmulatedBackendSpec(name="b", model="m"), EmulatedBackendSpec(name="c", model="m", port=port))
    with pytest.raises(OSError):
        await start_emulator(EmulatorSpec(backends=two))
    await first.close()
    second = await start_emulator(EmulatorSpec(backends=two))
    assert second.urls["c"].endswith(f":{port}/v1")
    await second.close()


@on_loop
async def test_emulate_runs_until_told_to_stop() -> None:
    """The command's function says where it listens, answers, and ends when the event is set."""
    stop, ready = asyncio.Event(), asyncio.Event()
    handles: list[Any] = []

    def is_ready(handle: Any) -> None:
        handles.append(handle)
        ready.set()

    options = EmulateOptions(models=("m", "n"), scale=100.0, output_tokens=3.0)
    task = asyncio.create_task(emulate(options, is_ready, stop))
    await asyncio.wait_for(ready.wait(), LIMIT_S)
    async with openai.AsyncOpenAI(base_url=handles[0].urls["n"], api_key="x", max_retries=0) as sdk:
        answer = await sdk.completions.create(model="n", prompt="hi")
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    stop.set()
    await asyncio.wait_for(task, LIMIT_S)


def test_scenarios_can_be_emulated() -> None:
    """The backends of a scenario are emulated with its true engines."""
    path = ROOT / "examples" / "scenarios" / "two_models.yaml"
    world = load_scenario(path)
    spec = spec_from_scenario(world, scale=10.0)
    assert [(b.name, b.model, b.engine) for b in spec.backends] == [
        ("a", "large", world.engines["a"]),
        ("b", "small", world.engines["b"]),
    ]
    assert emulator_spec(EmulateOptions(scenario=str(path))).backends == spec.backends


@pytest.mark.parametrize(
    ("make", "says_what"),
    [
        (lambda: EmulatorSpec(backends=()), "at least one"),
        (lambda: EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m"),) * 2), "two emulated backends"),
        (lambda: EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m"),), scale=math.nan), "scale is nan"),
        (lambda: EmulatedBackendSpec(name="", model="m"), "need a name"),
        (lambda: EmulatedBackendSpec(name="a", model="m", port=70000), "port .* 70000"),
        (lambda: EmulatedBackendSpec(name="a", model="m", context_tokens=0), "context_tokens"),
        (lambda: EmulateOptions(), "not both"),
        (lambda: EmulateOptions(models=("m",), scenario="x"), "not both"),
        (lambda: EmulateOptions(models=("m",), port=-1), "port is -1"),
        (lambda: emulator_spec(EmulateOptions(models=("m", "m"))), "two emulated backends"),
    ],
)
def test_bad_specifications_are_refused(make: Any, says_what: str) -> None:
    """Each mistake is a ConfigError that names the thing and the value."""
    with pytest.raises(ConfigError, match=says_what):
        make()


def test_filler_is_deterministic_and_of_its_length() -> None:
    """Equal bodies and seeds give equal texts; another body another; tokens are as drawn."""
    from loadwise.emulator.script import filler_script

    one, two = filler_script(seed=1), filler_script(seed=1)
    assert one(chat("x")) == two(chat("x"))
    assert one(chat("x")) != one(chat("y"))
    assert filler_script(seed=2)(chat("x")) != one(chat("x"))
    assert filler_script(12.0)(chat("x")).output_tokens == 12
    assert msgspec.json.decode(msgspec.json.encode(one(chat("x"))), type=Reply) == one(chat("x"))
