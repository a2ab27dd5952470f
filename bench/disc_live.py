"""Does a preset do over HTTP, with emulated engines in scaled time, what it does in the simulator?

python -m bench.disc_live [--json] [--quick] [--preset fast,oracle,...] [--scale 10] [--load 64] [--stream]

One world of `loadwise lab disc`, the same programs, luck and verdicts, once in virtual time and once live: the engines
(`loadwise emulate`) and the gateway (`loadwise serve`) are processes, agents ask over HTTP, and everybody's clock runs
`--scale` times as fast as the real one. The hit rate of the dear engine must agree within 0.05, programs per hour
within 10 %. How much of a difference is chance is seen from the simulator's own figures when agents begin a moment
apart (`ci95`, least and largest): they are other runs of the same world.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from bench import result
from bench.live_agents import Endpoint, LiveAgents, Lived, require_playable
from bench.live_site import Site, site
from loadwise.emulator.metrics import read_signals
from loadwise.lab.disc import Cell, Observer, Settings, scenario_of, world_names
from loadwise.router.machine import Router
from loadwise.settings import open_stack
from loadwise.sim.draw import Draw
from loadwise.sim.report import mean
from loadwise.sim.scenario import Scenario
from loadwise.sim.world import World
from loadwise.wire.client import Upstream

PRESETS = ("fast", "oracle", "thunderagent", "static_cap")
HIT_WITHIN = 0.05
RATE_WITHIN = 0.10
STAGGERS_S = (0.0, 0.05, 0.1, 0.2)
"""Of the agents' first programs in the simulated runs; the first is the world's own."""


class Asked(NamedTuple):
    """What is run."""

    world: str
    load: int
    n_programs: int
    seed: int
    scale: float
    is_stream: bool
    length: float
    """Turns of a program, relative to the world's."""
    spread: bool


def scenario_for(asked: Asked, preset: str) -> Scenario:
    """The world of one preset."""
    cell = Cell(
        world=asked.world,
        preset=preset,
        load=asked.load,
        seed=asked.seed,
        settings=Settings(n_programs=asked.n_programs),
    )
    scenario = scenario_of(cell)
    return scenario if asked.length == 1.0 else shortened(scenario, asked.length)


def shortened(scenario: Scenario, ratio: float) -> Scenario:
    """The world with programs of fewer turns."""
    turns = scenario.workload.turns
    if isinstance(turns, Draw):
        plain = msgspec.to_builtins(turns)
        plain = {name: _scaled(name, value, ratio) for name, value in plain.items()}
        workload = msgspec.structs.replace(scenario.workload, turns=msgspec.convert(plain, Draw))
    else:
        workload = msgspec.structs.replace(scenario.workload, turns=max(turns * ratio, 1.0))
    return msgspec.structs.replace(scenario, workload=workload)


def _scaled(name: str, value: Any, ratio: float) -> Any:
    if isinstance(value, dict):
        return {key: inner * ratio if key in ("mean", "median") else inner for key, inner in value.items()}
    return max(value * ratio, 1.0) if name in ("min", "max") and value is not None else value


def simulated(scenario: Scenario, seed: int) -> dict[str, float]:
    """One run in virtual time."""
    stack = open_stack(scenario.config, seed)
    router = stack.machine_by_name["router"]
    assert isinstance(router, Router)
    names = [backend.name for backend in scenario.backends]
    observer = Observer(router, names)
    world = World(
        scenario, stack, seed, journal=observer, hold_limit_s=scenario.config.router.hold_max_s, is_compiled=True
    )
    report = world.run()
    signals = {name: backend.signals(world.calendar.now_s) for name, backend in world.fleet.backends.items()}
    return {
        "programs_per_h": report.programs_per_h,
        "hit_ratio": hit_ratio(signals[names[0]]),
        "resolved": float(world.tally.n_solved),
        "wait_mean_s": mean(observer.waits_s) or 0.0,
        "call_mean_s": mean(observer.calls_s) or 0.0,
        "dear_share": report.share.get(scenario.backends[0].model, 0.0),
        "killed": float(scenario.n_programs or 0) - report.programs.get("finished", 0),
        "makespan_s": report.elapsed_s,
        "n_preemptions": sum(values["n_preemptions"] for values in signals.values()),
    }


def hit_ratio(signals: Mapping[str, float]) -> float:
    """Prefix tokens that an engine found in its cache."""
    return signals["prefix_hits_tokens"] / max(signals["prefix_queries_tokens"], 1.0)


async def _lived(scenario: Scenario, asked: Asked, running: Site) -> tuple[Lived, dict[str, Mapping[str, float]]]:
    endpoint = Endpoint(url=running.gateway_url)
    lived = await LiveAgents(scenario, asked.seed, endpoint, scale=asked.scale, is_stream=asked.is_stream).run()
    return lived, {name: await read_engine(url) for name, url in running.engine_urls.items()}


async def read_engine(url: str) -> Mapping[str, float]:
    """An emulated engine's readings."""
    upstream = Upstream(url)
    try:
        return read_signals((await upstream.get("/metrics", from_root=True)).body.decode())
    finally:
        await upstream.close()


def live(scenario: Scenario, asked: Asked) -> tuple[dict[str, float], dict[str, int]]:
    """One run over HTTP, and what went wrong with programs that did not finish."""
    with tempfile.TemporaryDirectory() as folder, site(scenario, Path(folder), scale=asked.scale) as running:
        lived, signals = uvloop.run(_lived(scenario, asked, running))
        used_s = running.cpu_s()
    dear = scenario.backends[0]
    figures = lived.figures(dear.model)
    figures["hit_ratio"] = hit_ratio(signals[dear.name])
    figures["n_preemptions"] = sum(values["n_preemptions"] for values in signals.values())
    real_s = lived.makespan_s / asked.scale
    figures |= {f"{name}_cpu_ratio": seconds / real_s for name, seconds in used_s.items()}
    return figures, lived.failures()


def measure(asked: Asked, presets: Sequence[str]) -> tuple[dict[str, float], dict[str, list[float]], dict[str, Any]]:
    """Every preset's figures, the simulator's spread, and the machine's load beside them."""
    values: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    notes: dict[str, Any] = {"load_average": {}, "failures": {}}
    for preset in presets:
        scenario = scenario_for(asked, preset)
        require_playable(scenario)
        staggers = STAGGERS_S if asked.spread else STAGGERS_S[:1]
        runs = [simulated(_staggered(scenario, mean_s), asked.seed) for mean_s in staggers]
        before = os.getloadavg()[0]
        found, failures = live(scenario, asked)
        notes["load_average"][preset] = [before, os.getloadavg()[0]]
        notes["failures"][preset] = failures
        ours = runs[0]
        values |= {f"{preset}.simulated.{key}": value for key, value in ours.items()}
        values |= {f"{preset}.live.{key}": value for key, value in found.items()}
        values[f"{preset}.off.hit_ratio"] = found["hit_ratio"] - ours["hit_ratio"]
        values[f"{preset}.off.programs_per_h"] = found["programs_per_h"] / ours["programs_per_h"] - 1.0
        for key in ("hit_ratio", "programs_per_h", "wait_mean_s"):
            series = [run[key] for run in runs]
            if len(series) > 1:
                spread[f"{preset}.simulated.{key}"] = [min(series), max(series)]
        print(_line(preset, ours, found), file=sys.stderr, flush=True)
    return values, spread, notes


def _staggered(scenario: Scenario, mean_s: float) -> Scenario:
    """The world with agents that begin a moment apart: another run of it."""
    if mean_s == 0.0:
        return scenario
    arrivals = msgspec.structs.replace(scenario.workload.arrivals, stagger_s=Draw(exponential=mean_s))
    workload = msgspec.structs.replace(scenario.workload, arrivals=arrivals)
    return msgspec.structs.replace(scenario, workload=workload)


def _line(preset: str, ours: Mapping[str, float], found: Mapping[str, float]) -> str:
    keys = ("programs_per_h", "hit_ratio", "wait_mean_s", "call_mean_s", "killed", "makespan_s")
    told = ", ".join(f"{key} {found[key]:.3f} ({ours[key]:.3f})" for key in keys)
    return f"{preset}: live (simulated): {told}; load {os.getloadavg()[0]:.1f}"


def checks(values: Mapping[str, float], presets: Sequence[str]) -> list[dict[str, Any]]:
    """What must agree."""
    bounds = {"hit_ratio": HIT_WITHIN, "programs_per_h": RATE_WITHIN}
    return [
        {"key": key, "op": "abs <=", "bound": bound, "holds": abs(values[key]) <= bound}
        for preset in presets
        for name, bound in bounds.items()
        for key in (f"{preset}.off.{name}",)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="16 short programs under preset fast; within a minute")
    parser.add_argument("--world", default="qwen-h200", choices=world_names())
    parser.add_argument("--preset", help=f"presets, separated by commas (default {','.join(PRESETS)})")
    parser.add_argument("--load", type=int, help="programs in flight (default 64; streamed 8; quick 16)")
    parser.add_argument("--programs", type=int, help="programs in all (default 108; streamed 8; quick 16)")
    parser.add_argument("--scale", type=float, help="world's seconds per real second (default 10; streamed 1)")
    parser.add_argument("--stream", action="store_true", help="ask for streams, at 1x and 8 programs")
    parser.add_argument("--length", type=float, help="turns relative to the world's (default 1; quick 0.25)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    quick, stream = arguments.quick, arguments.stream
    asked = Asked(
        world=arguments.world,
        load=arguments.load or (8 if stream else 16 if quick else 64),
        n_programs=arguments.programs or (8 if stream else 16 if quick else 108),
        seed=arguments.seed,
        scale=arguments.scale or (1.0 if stream else 10.0),
        is_stream=stream,
        length=arguments.length or ((0.05 if stream else 0.25) if quick else 1.0),
        spread=not quick,
    )
    presets = tuple((arguments.preset or ("fast" if quick else ",".join(PRESETS))).split(","))
    values, spread, notes = measure(asked, presets)
    config = {**asked._asdict(), **notes, "presets": list(presets), "quick": quick}
    report = result.build(
        "disc_live", values=values, config=config, seeds=[asked.seed], ci95=spread, checks=checks(values, presets)
    )
    result.show(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
