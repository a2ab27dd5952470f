"""A router whose seconds pass faster, in front of engines emulated at the same scale."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engines import Engine
from hypothesis import given
from hypothesis import strategies as st
from sites import on_loop, site

from loadwise.gateway import host as host_module
from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.host import Host
from loadwise.gateway.serve import resumed_at_s
from loadwise.kernel.commands import SetTimer
from loadwise.kernel.errors import ConfigError
from loadwise.settings import open_stack


class Clock:
    """`time.monotonic` of a test."""

    def __init__(self) -> None:
        self.real_s = 1000.0

    def monotonic(self) -> float:
        return self.real_s


POOL: dict[str, Any] = {"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}]}


@pytest.mark.parametrize("scale", [0.5, 1.0, 10.0])
def test_the_runs_clock_and_its_timers_keep_the_scale(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """So many seconds of the run pass per real one, from where it began; a timer waits so many times less."""
    clock, waited_s = Clock(), list[float]()
    monkeypatch.setattr(host_module, "time", clock)

    @on_loop
    async def run() -> None:
        loop = asyncio.get_running_loop()
        host = Host(open_stack(POOL), None, started_at_s=50.0, time_scale=scale)
        clock.real_s += 3.0
        assert host.now_s() == 50.0 + 3.0 * scale
        real = loop.call_later

        def call_later(delay_s: float, *arguments: Any) -> asyncio.TimerHandle:
            waited_s.append(delay_s)
            return real(3600.0, *arguments)

        monkeypatch.setattr(host, "_loop", type("Loop", (), {"call_later": staticmethod(call_later)}))
        host._set_timer(SetTimer(timer="router", fires_at_s=host.now_s() + 20.0))
        assert waited_s == [20.0 / scale]
        monkeypatch.setattr(host, "_loop", loop)
        host.close()

    run()


@on_loop
async def test_probes_look_as_often_in_the_runs_time() -> None:
    """`probe_interval_s` is of the run's clock, as all that a router is told of."""
    async with site(Engine(), probe_interval_s=5.0, time_scale=100.0) as s:
        assert [probe.interval_s for probe in s.gateway.probes] == [0.05]
        assert (await s.chat("p")).status == 200


@given(st.floats(0.0, 1e6), st.floats(0.1, 100.0))
def test_time_that_nobody_served_counts_at_the_scale(away_s: float, scale: float) -> None:
    """A restart finds the run's clock where it would stand."""
    assert resumed_at_s(0.0, 1000.0, 1000.0 + away_s, scale) == ((1000.0 + away_s) - 1000.0) * scale


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e4, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    """The error names key, value and limits."""
    with pytest.raises(ConfigError, match=r"gateway.time_scale is .*; it must be in \[0.001, 1000\]"):
        GatewayConfig(time_scale=scale)
