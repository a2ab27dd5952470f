"""Other routers beside Loadwise's presets, over the same emulated engines and the same agents: a report, no condition.

python -m bench.disc_peers [--json] [--quick] [--contestant fast,thunderagent,smg,vllm-router,...] [--scale 10]

Two replicas of one model, since most peers choose among replicas and not among models: the dear model of a world of
`loadwise lab disc`, with a third of its cache and programs half as long, so that a run is short and its caches are too
small for all programs at once. Every contestant meets fresh engines and the same programs in a closed loop, in scaled
time. Dynamo's parts come with engines of their own: `bench.dynamo_peers`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench import load, result
from bench.disc_live import hit_ratio, read_engine, shortened
from bench.emulator import STEP
from bench.live_agents import Endpoint, LiveAgents
from bench.live_site import emulated, site
from bench.peers import PEERS, PeerUnavailable
from bench.peers.peer import Peer
from bench.peers.peer import start as start_peer
from bench.pinned import ProcessFailed, cores
from loadwise.lab.disc import read_world
from loadwise.sim.scenario import Scenario, convert_scenario
from loadwise.sim.vllm_engine import VllmEngineSpec

PRESETS = ("vllm_alone", "static_cap", "thunderagent", "oracle", "fast")
OTHERS = ("smg", "smg-round-robin", "vllm-router", "vllm-router-round-robin")
MODEL = "m"
WORLD = "qwen-gh200"
LENGTH = 0.5
STAGGER = {"exponential": 1}


def scenario_of(preset: str, *, n_programs: int, load: int, blocks: int) -> Scenario:
    """Two replicas of an 8B model, and agents of a dozen turns: short enough for real time."""
    engine = {"kind": "vllm", "step": msgspec.to_builtins(STEP), "num_gpu_blocks": blocks, "block_size": 16}
    backends = [{"name": name, "model": MODEL, "engine": "emulator", "kv_tokens": blocks * 16} for name in "ab"]
    router = {"hold_max_s": 7200, "park_s": 3600, "idle_s": 7200, "admission": {"programs_max": max(load // 3, 1)}}
    document = {
        "scenario": 1,
        "name": "peers",
        "n_programs": n_programs,
        "pool": {
            "preset": preset,
            "models": {MODEL: {"expected_tokens": 9000, "expected_run_s": 60}},
            "backends": backends,
            "router": router,
        },
        "engines": {"a": engine, "b": engine},
        "workload": {
            "arrivals": {"kind": "closed", "n_agents": load, "stagger_s": {"exponential": 1}},
            "turns": {"gamma": {"shape": 4, "mean": 12}, "min": 3, "max": 30},
            "shared_tokens": 1008,
            "first_prompt_tokens": {"lognormal": {"median": 1500, "sigma": 0.3}, "min": 1100},
            "growth_tokens": {"lognormal": {"median": 400, "sigma": 0.4}},
            "output_tokens": {"gamma": {"shape": 4, "mean": 200}, "min": 20},
            "tool_s": {"exponential": 2},
        },
        "verdicts": {"source": "agent", "delay_s": {"exponential": 10}},
        "signals": {"every_s": 0.5, "delay_s": 0.02},
    }
    return convert_scenario(document)


def pressed_scenario(preset: str, *, n_programs: int, load: int, blocks: int) -> Scenario:
    """Two replicas of a world's dear model, without a budget of time, and that world's agents."""
    world = read_world(WORLD)
    dear = world["gap"]["dear"]
    (declared,) = (one for one in world["pool"]["backends"] if one["model"] == dear)
    engine = {**world["engines"][declared["name"]], "num_gpu_blocks": blocks}
    limits = {name: declared[name] for name in ("first_byte_timeout_s", "idle_timeout_s") if name in declared}
    backends = [{"name": name, "model": MODEL, "engine": "emulator", "kv_tokens": 1, **limits} for name in "ab"]
    facts = world["pool"]["models"][dear]
    model = {**facts, **{name: facts[name] * LENGTH for name in ("expected_tokens", "expected_run_s")}}
    model["expected_tokens"] = int(model["expected_tokens"])
    router = {name: value for name, value in world["pool"]["router"].items() if not name.startswith("budget")}
    cap = max(round(world["caps"][dear] * load / 96), 1)
    router["admission"] = {**router.get("admission", {}), "programs_max": cap}
    document = {
        "scenario": 1,
        "name": "peers",
        "n_programs": n_programs,
        "pool": {"preset": preset, "models": {MODEL: model}, "backends": backends, "router": router},
        "engines": {"a": engine, "b": engine},
        "workload": {**world["workload"], "arrivals": {"kind": "closed", "n_agents": load, "stagger_s": STAGGER}},
        "verdicts": world["verdicts"],
        "signals": world["signals"],
    }
    spec = convert_scenario(document).engine_spec("a")
    assert isinstance(spec, VllmEngineSpec)
    for backend in backends:
        backend["kv_tokens"] = spec.n_blocks * spec.block_tokens
    return shortened(convert_scenario(document), LENGTH)


@contextmanager
def contestant(name: str, scenario: Scenario, scale: float) -> Iterator[tuple[Endpoint, Mapping[str, str]]]:
    """Fresh engines behind one contestant; gives whom to ask, and the engines' addresses."""
    with tempfile.TemporaryDirectory() as folder:
        if name in PRESETS:
            with site(scenario, Path(folder), scale=scale) as running:
                yield Endpoint(url=running.gateway_url, wants_min_tokens=False), running.engine_urls
            return
        with emulated(scenario, Path(folder), scale=scale) as (urls, _):
            started = start_peer(over(PEERS[name], list(urls.values())), "", cores()[0], "key")
            with started.process as process:
                process.wait_ready(lambda: _answers(started.port), PEERS[name].ready_limit_s)
                url = f"http://127.0.0.1:{started.port}/v1"
                yield Endpoint(url=url, model=MODEL, has_programs=False, wants_min_tokens=False), urls


def over(peer: Peer, urls: Sequence[str]) -> Peer:
    """The peer in front of several engines."""
    roots = [url.removesuffix("/v1") for url in urls]
    argv = [part for part in peer.argv if not part.startswith("--worker-urls")]
    return msgspec.structs.replace(peer, argv=(*argv, "--worker-urls", *roots))


def _answers(port: int) -> bool:
    try:
        return load.get(port, "/v1/models") is not None
    except (OSError, load.LoadFailed):
        return False


async def _lived(
    scenario: Scenario, seed: int, endpoint: Endpoint, urls: Mapping[str, str], scale: float
) -> tuple[dict[str, float], dict[str, int]]:
    lived = await LiveAgents(scenario, seed, endpoint, scale=scale).run()
    signals = [await read_engine(url) for url in urls.values()]
    total = {key: sum(one[key] for one in signals) for key in signals[0]}
    kept = ("programs_per_h", "wait_mean_s", "first_answer_mean_s", "call_mean_s", "killed", "makespan_s")
    figures = {key: value for key, value in lived.figures(MODEL).items() if key in kept}
    figures |= {"hit_ratio": hit_ratio(total), "n_preemptions": total["n_preemptions"]}
    return figures, lived.failures()


def measure(names: Sequence[str], seed: int, scale: float, **shape: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures by contestant, and why some contestants or programs have none."""
    found: dict[str, Any] = {}
    notes: dict[str, Any] = {"absent": {}, "failures": {}}
    for name in names:
        scenario = pressed_scenario(name if name in PRESETS else "vllm_alone", **shape)
        began_at_s = time.monotonic()
        try:
            with contestant(name, scenario, scale) as (endpoint, urls):
                found[name], notes["failures"][name] = uvloop.run(_lived(scenario, seed, endpoint, urls, scale))
        except (PeerUnavailable, ProcessFailed) as problem:
            notes["absent"][name] = str(problem)[-1000:]
            continue
        found[name]["load_average"] = os.getloadavg()[0]
        told = ", ".join(f"{key} {value:.3f}" for key, value in found[name].items())
        print(f"{name}: {told} ({time.monotonic() - began_at_s:.0f} s)", file=sys.stderr, flush=True)
    return found, notes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="two contestants, 12 programs")
    parser.add_argument("--contestant", help=f"separated by commas (default {','.join((*PRESETS, *OTHERS))})")
    parser.add_argument("--load", type=int, default=48, help="programs in flight (default 48)")
    parser.add_argument("--programs", type=int, help="programs in all (default 96; quick 12)")
    parser.add_argument("--blocks", type=int, default=300, help="cache of each engine, in its blocks (default 300)")
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    names = (arguments.contestant or ("fast,smg" if arguments.quick else ",".join((*PRESETS, *OTHERS)))).split(",")
    shape: dict[str, int] = {
        "n_programs": arguments.programs or (12 if arguments.quick else 96),
        "load": arguments.load,
        "blocks": arguments.blocks,
    }
    found, notes = measure(names, arguments.seed, arguments.scale, **shape)
    config = {**shape, "scale": arguments.scale, "contestants": names, **notes}
    config["load_average"] = os.getloadavg()[0]
    report = result.build("disc_peers", values={}, config=config, seeds=[arguments.seed], peers=found)
    result.show(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
