"""Every misbehaviour that a test may ask of an emulated engine."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from loadwise.emulator.fault import Fault, parse_fault
from loadwise.kernel.errors import CallerError, ConfigError
from loadwise.sim.simple_engine import SimpleEngineSpec

from .loopback import LIMIT_S, Answer, chat, on_loop, running, says

SLOW = SimpleEngineSpec(decode_steps_per_s=20.0)
STREAM = chat("x", stream=True, stream_options={"include_usage": True})


def header(**fields: Any) -> bytes:
    return b"x-emulator-fault: " + msgspec.json.encode(fields) + b"\r\n"


async def ask(is_stream: bool, **fields: Any) -> Answer:
    """One call with a fault; afterwards nothing is left in the engine, and the next call is well."""
    async with running(says("abcdefghij" * 4, 20), engine=SLOW) as client:
        answer = await client.ask(STREAM if is_stream else chat("x"), headers=header(**fields))
        assert client.backend.driver.n_open == 0
        assert client.backend.driver.signals()["n_running"] == 0
        assert (await client.ask(chat("y"))).status == 200
        return answer


@on_loop
async def test_hang_sends_nothing() -> None:
    """No byte comes; a client that gives up leaves nothing behind."""
    async with running(says("x", 5)) as client:
        answer = client.send(chat("x"), headers=b"x-emulator-fault: hang\r\n")
        done, _ = await asyncio.wait([answer.over], timeout=0.1)
        assert not done and answer.status == 0
        assert answer.attempt is not None
        answer.attempt.cancel()
        assert (await client.ask(chat("x"))).status == 200


@pytest.mark.parametrize("n", [1, 7])
@on_loop
async def test_reset_breaks_the_stream_after_its_tokens(n: int) -> None:
    """So many tokens arrive, then half a line, then the connection breaks."""
    answer = await ask(True, kind="reset", after_tokens=n)
    assert answer.over.result() in ("reset", "truncated")
    whole, cut = answer.body.rsplit(b"\n\n", 1)
    assert cut == b'data: {"id": "cut'
    events = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in whole.split(b"\n\n")]
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert len(text) == 2 * n
    assert b"[DONE]" not in answer.body


@on_loop
async def test_reset_before_the_first_byte() -> None:
    """With no tokens at all the connection just closes."""
    answer = await ask(True, kind="reset", after_tokens=0)
    assert answer.over.result() in ("reset", "truncated") and answer.body == b""


@on_loop
async def test_truncated_stream_ends_as_if_it_were_whole() -> None:
    """HTTP is in order, but the stream stops in the middle of a line and [DONE] is missing."""
    answer = await ask(True, kind="truncate", after_tokens=3)
    assert answer.over.result() == "end" and answer.status == 200
    assert answer.body.endswith(b'data: {"id": "cut')


@pytest.mark.parametrize("kind", ["reset", "truncate"])
@on_loop
async def test_plain_answers_break_in_the_middle(kind: str) -> None:
    """An answer that is not streamed stops inside its JSON."""
    answer = await ask(False, kind=kind)
    assert (answer.over.result() == "end") == (kind == "truncate")
    assert 0 < len(answer.body) < 40


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_invalid_json(is_stream: bool) -> None:
    """The answer is whole and no JSON."""
    answer = await ask(is_stream, kind="invalid_json")
    assert answer.over.result() == "end" and answer.status == 200
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        _ = answer.chunks if is_stream else answer.json


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_usage_can_be_missing(is_stream: bool) -> None:
    """The answer is good but says nothing of tokens."""
    answer = await ask(is_stream, kind="no_usage")
    assert b'"usage"' not in answer.body
    assert answer.chunks if is_stream else answer.json["choices"]


@pytest.mark.parametrize(("status", "retry"), [(429, 3.0), (500, None), (503, 0.5)])
@on_loop
async def test_status_faults_carry_retry_after(status: int, retry: float | None) -> None:
    """The status asked for, an error body, and Retry-After where told."""
    answer = await ask(False, kind="status", status=status, retry_after_s=retry)
    assert answer.status == status and answer.json["error"]["code"] == status
    expected = None if retry is None else f"{retry:g}".encode()
    assert answer.headers.get(b"retry-after") == expected


@on_loop
async def test_slow_answers_come_late_and_whole() -> None:
    """Nothing happens for the delay, then the answer is as ever; a client that leaves before is forgotten."""
    async with running(says("x", 5)) as client:
        asked_at_s = time.monotonic()
        late = await client.ask(chat("x"), headers=header(kind="slow", delay_s=0.15))
        assert time.monotonic() - asked_at_s >= 0.14
        assert late.json["choices"][0]["message"]["content"] == "x"
        left = client.send(chat("z"), headers=header(kind="slow", delay_s=3600.0))
        prompt = await client.ask(chat("y"))
        assert prompt.status == 200 and not left.over.done()
        assert left.attempt is not None
        left.attempt.cancel()
        await client.get("/health")
        assert client.backend.driver.n_open == 0


@on_loop
async def test_a_backend_goes_down_and_comes_up_on_its_port() -> None:
    """Down: what runs breaks and what comes is refused. Up again: the same address, an empty engine."""
    async with running(says("x" * 400, 2000), engine=SLOW, scale=20) as client:
        open_call = client.send(STREAM)
        await asyncio.wait_for(open_call.begun, LIMIT_S)
        url = client.backend.url
        await client.backend.go_down()
        assert await asyncio.wait_for(open_call.over, LIMIT_S) in ("reset", "truncated")
        refused = await client.ask(chat("x"))
        assert refused.over.result() == "refused"
        await client.backend.come_up()
        assert client.backend.url == url
        assert (await client.ask(chat("x", max_tokens=3))).status == 200


@on_loop
async def test_a_backends_own_fault_befalls_its_share() -> None:
    """A fault with a ratio befalls that share of requests, the same ones for the same seed; it can be taken back."""
    statuses = []
    for _ in range(2):
        async with running(says("x", 1), fault=Fault(kind="status", status=500, ratio=0.5)) as client:
            statuses.append([(await client.ask(chat(f"{i}"))).status for i in range(40)])
            client.backend.fault = None
            assert (await client.ask(chat("well"))).status == 200
    assert statuses[0] == statuses[1]
    assert 8 <= statuses[0].count(500) <= 32


@on_loop
async def test_faults_are_off_by_default() -> None:
    """Without the switch the header is an unknown header like any other."""
    from loadwise.emulator.backend import EmulatedBackendSpec
    from loadwise.emulator.emulator import EmulatorSpec, start_emulator

    from .loopback import Client

    handle = await start_emulator(EmulatorSpec(backends=(EmulatedBackendSpec(name="a", model="m"),), scale=200.0))
    client = Client(handle.backends["a"])
    assert (await client.ask(chat("x", max_tokens=2), headers=b"x-emulator-fault: hang\r\n")).status == 200
    await client.upstream.close()
    await handle.close()


@pytest.mark.parametrize("value", [b"explode", b"{", b'{"kind": "hang", "x": 1}', b'{"kind": "status", "status": 200}'])
def test_unknown_faults_are_refused(value: bytes) -> None:
    """A misspelt fault is an error, not a healthy answer."""
    with pytest.raises(CallerError, match="x-emulator-fault"):
        parse_fault(value)


@pytest.mark.parametrize("fields", [{"after_tokens": -1}, {"delay_s": float("inf")}, {"ratio": 2.0}, {"status": 302}])
def test_faults_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    """Numbers outside their range are named."""
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Fault(kind="reset", **fields)
