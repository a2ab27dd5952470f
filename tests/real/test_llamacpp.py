"""A real language model behind the real gateway: SmolLM2-135M in llama.cpp's own server, asked by the OpenAI SDK."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]

pytest.importorskip("xllamacpp")
openai = pytest.importorskip("openai")

from loadwise.demo import weights  # noqa: E402
from loadwise.demo.live import LoopThread, real_pool  # noqa: E402
from loadwise.gateway.config import GatewayConfig  # noqa: E402
from loadwise.gateway.serve import Gateway, start  # noqa: E402
from loadwise.journal.explain import why  # noqa: E402
from loadwise.journal.parity import replay  # noqa: E402
from loadwise.settings import parse_config  # noqa: E402

MODEL = weights.MODEL
LIMIT_S = 1800.0
PATIENCE = {"first_byte_timeout_s": LIMIT_S, "idle_timeout_s": LIMIT_S}
"""On a busy machine a token may take a minute: the threads of an engine wait for each other."""
SHORT = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    """A llama.cpp server with two slots."""
    with real_pool({MODEL: weights.smollm2()}, slots=2)(lambda body: None) as urls:  # type: ignore[arg-type, return-value]
        yield urls[MODEL]


@pytest.fixture
def gateway(engine_url: str, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway over the engine, its journal in a folder of the test."""
    config = parse_config(
        {
            "models": {MODEL: {"usd_per_million": {"input": 0.02, "output": 0.02}}},
            "backends": [
                {"name": "cpu", "model": MODEL, "url": engine_url, "engine": "llamacpp", "slots": 2, **PATIENCE}
            ],
        }
    )
    thread = LoopThread("gateway")
    running = thread.run(start(config, GatewayConfig(port=0, journal=str(tmp_path / "journal"), grace_s=1.0)))
    try:
        yield running
    finally:
        thread.run(running.close())
        thread.close()


def ask(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def test_an_agent_is_served_judged_and_explained_and_the_journal_replays(gateway: Gateway, tmp_path: Path) -> None:
    """OpenAI SDK, real model, verdict, why; and the live journal gives the same commands again (law L7)."""
    headers = {"X-Session-ID": "agent-1"}
    with openai.OpenAI(
        base_url=gateway.url + "/v1", api_key="unused", timeout=LIMIT_S, default_headers=headers
    ) as client:
        first = client.chat.completions.create(model="auto", messages=ask("What is 7 + 8?"), **SHORT)
        said = first.choices[0].message.content
        messages = [*ask("What is 7 + 8?"), {"role": "assistant", "content": said}, *ask("And 9 + 9?")]
        second = client.chat.completions.create(model="auto", messages=messages, **SHORT)
        assert said and second.choices[0].message.content
        assert second.usage.prompt_tokens > first.usage.prompt_tokens > 0
        judged = client.post("/programs/agent-1/verdict", body={"verdict": "pass", "id": "v1"}, cast_to=object)
    assert judged == {"program": "agent-1", "credited": True, "decision": 1}
    told = why(tmp_path / "journal", "agent-1")
    assert told.decisions[0].chosen == MODEL
    assert [verdict.verdict for verdict in told.verdicts] == ["pass"] and told.reward == 1.0
    report = replay(tmp_path / "journal")
    assert report.holds and report.n_decisions == 1


def test_streams_in_a_row_survive_an_engine_that_closes_after_each(gateway: Gateway) -> None:
    """llama.cpp closes the connection after a streamed reply although it advertises keep-alive; no request is lost."""
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", timeout=LIMIT_S, max_retries=0) as client:
        for number in range(12):
            stream = client.chat.completions.create(
                model="auto", messages=ask(f"Say the number {number}."), stream=True, max_tokens=4, temperature=0
            )
            chunks = list(stream)
            assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
            assert all(chunk.usage is None for chunk in chunks if chunk.choices)
            whole = client.chat.completions.create(
                model=MODEL, messages=ask(f"Say the number {number}."), max_tokens=4, temperature=0
            )
            assert whole.usage.completion_tokens >= 1
    assert gateway.host.router.counts.failed == 0


def test_signals_of_the_real_engine_are_read(gateway: Gateway) -> None:
    """llama.cpp's own metrics become signals with an age."""
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", timeout=LIMIT_S) as client:
        client.chat.completions.create(model="auto", messages=ask("Hello"), **SHORT)
        client.get("/models", cast_to=object)
    state = gateway.host.router.backends.by_id
    give_up_at_s = time.monotonic() + LIMIT_S
    while not {name for backend in state.values() for name in tuple(backend.signals)} >= {"n_running", "n_waiting"}:
        assert time.monotonic() < give_up_at_s, state  # a busy engine shows them late
        time.sleep(0.05)
