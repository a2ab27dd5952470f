"""The driver under a clock of the test's own: engine time does not depend on when the loop wakes."""

import asyncio
import math

import pytest

from loadwise.emulator.driver import EngineDriver
from loadwise.kernel.errors import ConfigError
from loadwise.sim.engine import EngineRequest, Output
from loadwise.sim.simple_engine import SimpleEngine, SimpleEngineSpec

from .loopback import on_loop

SPEC = SimpleEngineSpec(prefill_tokens_per_s=1000.0, decode_steps_per_s=10.0, batch_slowdown_ratio=0.0)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(i: int, prompt: int = 100, output: int = 11) -> EngineRequest:
    return EngineRequest(request_id=i, program_id=f"p{i}", prompt_tokens=prompt, output_tokens=output)


@on_loop
async def test_late_wakes_do_not_slow_the_engine() -> None:
    """Woken once, long after, the engine has done all its work at its own instants."""
    clock, heard = Clock(), list[Output]()
    driver = EngineDriver(SimpleEngine(SPEC), scale=2.0, clock=clock)
    driver.submit(request(1), heard.append)
    driver.submit(request(2, prompt=50), heard.append)
    clock.now_s = 50.0
    driver.wake()
    assert sum(o.n_new_tokens for o in heard if o.request_id == 1) == 11
    assert {o.request_id for o in heard if o.is_finished} == {1, 2}
    assert driver.n_open == 0
    driver.close()


@on_loop
async def test_scale_turns_real_seconds_into_engine_seconds() -> None:
    """At scale four a request of 1.1 engine seconds is done after 0.275 real ones, not before."""
    clock, heard = Clock(), list[Output]()
    driver = EngineDriver(SimpleEngine(SPEC), scale=4.0, clock=clock)
    driver.submit(request(1), heard.append)
    clock.now_s = 0.27
    driver.wake()
    assert not any(o.is_finished for o in heard)
    clock.now_s = 0.28
    driver.wake()
    assert heard[-1].is_finished
    driver.close()


@on_loop
async def test_streams_hear_tokens_between_the_engines_own_instants() -> None:
    """A streamed request hears tokens at every wake, one that is not streamed only at its end."""
    for is_stream, n_heard in ((True, 5), (False, 1)):
        clock, heard = Clock(), list[Output]()
        driver = EngineDriver(SimpleEngine(SPEC), clock=clock)
        driver.submit(request(1), heard.append, is_stream=is_stream)
        for now_s in (0.11, 0.35, 0.55, 0.75, 1.0):
            clock.now_s = now_s
            driver.wake()
        assert len(heard) == n_heard
        assert sum(o.n_new_tokens for o in heard) == (10 if is_stream else 1)
        driver.close()


@on_loop
async def test_an_idle_engine_has_no_timer() -> None:
    """Nothing is scheduled before the first request and after the last."""
    clock, heard = Clock(), list[Output]()
    driver = EngineDriver(SimpleEngine(SPEC), clock=clock)
    assert driver._timer is None
    driver.submit(request(1), heard.append)
    assert driver._timer is not None
    clock.now_s = 5.0
    driver.wake()
    assert heard[-1].is_finished
    assert driver._timer is None
    driver.close()


@on_loop
async def test_cancel_is_at_once_and_harmless_when_repeated() -> None:
    """After cancel the engine holds nothing, nobody hears of the request, and a second cancel does nothing."""
    clock, heard = Clock(), list[Output]()
    driver = EngineDriver(SimpleEngine(SPEC), clock=clock)
    driver.submit(request(1, output=1000), heard.append)
    clock.now_s = 3.0
    driver.cancel(1)
    assert driver.signals()["kv_usage_ratio"] == 0.0
    n_heard = len(heard)
    driver.cancel(1)
    driver.cancel(99)
    clock.now_s = 99.0
    driver.wake()
    assert len(heard) == n_heard
    driver.close()


@on_loop
async def test_speed_changes_from_now_on() -> None:
    """Half way through, at a tenth of the speed, the rest takes ten times as long."""
    clock, heard = Clock(), list[Output]()
    driver = EngineDriver(SimpleEngine(SPEC), clock=clock)
    driver.submit(request(1), heard.append)
    clock.now_s = 0.65  # The step under way ends at 0.7; four more follow.
    driver.set_speed(0.1)
    clock.now_s = 4.65
    driver.wake()
    assert not heard[-1].is_finished
    clock.now_s = 4.75
    driver.wake()
    assert heard[-1].is_finished
    driver.close()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scales_out_of_range_are_refused(scale: float) -> None:
    """A scale must be a finite positive number."""

    async def make() -> None:
        EngineDriver(SimpleEngine(SPEC), scale=scale)

    with pytest.raises(ConfigError, match="scale"):
        asyncio.run(make())
