"""A scenario's failures befall emulated engines as they befall simulated ones."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from loadwise.emulator import misfortune
from loadwise.emulator.backend import EmulatedBackendSpec
from loadwise.emulator.emulator import EmulatorSpec, spec_from_scenario, start_emulator
from loadwise.kernel.errors import ConfigError
from loadwise.sim.scenario import Failure, parse_scenario
from loadwise.sim.vllm_engine import VllmEngineSpec
from loadwise.wire.client import UpstreamError

from .loopback import LIMIT_S, Client, chat, on_loop

SPEC = VllmEngineSpec(num_gpu_blocks=400)
LONG = "s" * 1600


async def emulated(*failures: Failure, scale: float = 100.0) -> tuple[Any, Client]:
    """One backend with failures of its own."""
    backend = EmulatedBackendSpec(name="a", model="m", engine=SPEC)
    handle = await start_emulator(EmulatorSpec(backends=(backend,), scale=scale, failures=failures))
    return handle, Client(handle.backends["a"])


async def cached(client: Client) -> int:
    """Tokens of one and the same prompt that are found."""
    answer = await client.ask(chat(LONG, max_tokens=4))
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


class Hours:
    """`asyncio` of misfortunes: each of them sleeps until the test says that its hour has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s: list[float] = []
        self._struck = asyncio.Semaphore(0)
        loops = {"get_running_loop": asyncio.get_running_loop, "gather": asyncio.gather}
        monkeypatch.setattr(misfortune, "asyncio", SimpleNamespace(sleep=self._sleep, **loops))

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await self._struck.acquire()

    def strike(self) -> None:
        """Let who sleeps go on."""
        self._struck.release()


async def until(state: Any, wanted: Any) -> None:
    """Wait for a state that must come."""
    async with asyncio.timeout(LIMIT_S):
        while state() != wanted:
            await asyncio.sleep(0.001)


@on_loop
async def test_a_crash_breaks_what_runs_and_comes_back_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream breaks, connections are refused, and when it is back the cache is empty."""
    hours = Hours(monkeypatch)
    handle, client = await emulated(Failure(at_s=12.0, backend="a", kind="crash", for_s=6.0), scale=20.0)
    backend = handle.backends["a"]
    assert (await cached(client), await cached(client)) == (0, 400)
    answer = client.send(chat("hello", max_tokens=5900, ignore_eos=True, stream=True))
    await answer.begun
    hours.strike()
    assert await answer.over in ("reset", "truncated")
    assert backend._server is None
    assert await client.send(chat(LONG)).over == "refused"
    hours.strike()
    await until(lambda: backend._server is not None, True)
    assert (await cached(client), await cached(client)) == (0, 400)
    assert hours.slept_s == [12.0 / 20.0, 6.0 / 20.0]
    await client.upstream.close()
    await handle.close()


@on_loop
async def test_a_slow_engine_is_slow_until_it_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps take longer from the instant on that the scenario names, and not afterwards."""
    hours = Hours(monkeypatch)
    handle, client = await emulated(Failure(at_s=0.0, backend="a", kind="slow", speed_ratio=0.01, for_s=200.0))
    driver = handle.backends["a"].driver
    assert driver.engine._speed_ratio == 1.0
    hours.strike()
    await until(lambda: driver.engine._speed_ratio, 0.01)
    hours.strike()
    await until(lambda: driver.engine._speed_ratio, 1.0)
    assert await cached(client) == 0
    await client.upstream.close()
    await handle.close()


@on_loop
async def test_a_hung_engine_takes_requests_and_says_nothing_until_it_is_well() -> None:
    """Neither a stream that runs nor one that comes, nor a probe, hears anything; then all are answered whole."""
    handle, client = await emulated()
    backend = handle.backends["a"]
    running = client.send(chat("one", max_tokens=500, ignore_eos=True, stream=True))
    await running.begun
    backend.hang()
    coming = client.send(chat("two", max_tokens=5, ignore_eos=True))
    await until(lambda: backend.driver.n_open, 2)
    with pytest.raises(UpstreamError):
        await client.upstream.get("/health", from_root=True, timeout_s=0.05)
    n_bytes = len(running.body)
    backend.driver.wake()
    assert len(running.body) == n_bytes and not coming.over.done()
    await backend.recover()
    assert (await running.over, await coming.over) == ("end", "end")
    assert coming.json["usage"]["completion_tokens"] == 5
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in running.chunks)
    assert len(said) == 4 * 500
    await client.upstream.close()
    await handle.close()


def test_a_scenarios_failures_are_the_emulators() -> None:
    """One script for both; a failure of a backend that is not emulated is refused."""
    text = """
scenario: 1
name: s
n_programs: 1
pool: {models: {m: {}}, backends: [{name: a, model: m}]}
workload: {arrivals: {kind: closed, n_agents: 1}}
failures: [{at_s: 5, backend: a, kind: crash, for_s: 2}]
"""
    assert spec_from_scenario(parse_scenario(text)).failures == (
        Failure(at_s=5.0, backend="a", kind="crash", for_s=2.0),
    )
    with pytest.raises(ConfigError, match="befalls 'b'; emulated are a"):
        EmulatorSpec(
            backends=(EmulatedBackendSpec(name="a", model="m"),),
            failures=(Failure(at_s=0.0, backend="b", kind="crash"),),
        )
