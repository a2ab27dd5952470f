"""Other routers beside Loadwise's presets, over the same emulated engines and the same agents: a report, no condition.

python -m bench.disc_peers [--json] [--quick] [--contestant fast,thunderagent,smg,vllm-router,...] [--scale 10]

Two replicas of one model, whose caches are too small for all programs at once, since most peers choose among replicas
and not among models. Every contestant meets fresh engines and the same programs in a closed loop, in scaled time.
Dynamo's parts come with engines of their own: `bench.dynamo_peers`.
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
from bench.disc_live import hit_ratio, read_engine
from bench.emulator import STEP
from bench.live_agents import Endpoint, LiveAgents
from bench.live_site import emulated, site
from bench.peers import PEERS, PeerUnavailable
from bench.peers.peer import Peer
from bench.peers.peer import start as start_peer
from bench.pinned import ProcessFailed, cores
from loadwise.sim.scenario import Scenario, convert_scenario

PRESETS = ("vllm_alone", "static_cap", "thunderagent", "oracle", "fast")
OTHERS = ("smg", "smg-round-robin", "vllm-router", "vllm-router-round-robin")
MODEL = "m"


def scenario_of(preset: str, *, n_programs: int, load: int, blocks: int) -> Scenario:
    """Two replicas of an 8B model, and agents of a dozen turns."""
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
        scenario = scenario_of(name if name in PRESETS else "vllm_alone", **shape)
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
    parser.add_argument("--quick", action="store_true", help="two contestants, 16 programs")
    parser.add_argument("--contestant", help=f"separated by commas (default {','.join((*PRESETS, *OTHERS))})")
    parser.add_argument("--load", type=int, default=24, help="programs in flight (default 24)")
    parser.add_argument("--programs", type=int, help="programs in all (default 72; quick 16)")
    parser.add_argument("--blocks", type=int, default=4000, help="cache of each engine in blocks of 16 tokens")
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    names = (arguments.contestant or ("fast,smg" if arguments.quick else ",".join((*PRESETS, *OTHERS)))).split(",")
    shape = {
        "n_programs": arguments.programs or (16 if arguments.quick else 72),
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
