"""Worlds that nobody has chosen: the given ones, bent at random, under our presets and their peers.

Capacity, turns (mean, shape, tail), growth, answers, gaps, the second model's turns, success gap, wrong priors,
replicas and one GPU for both are drawn from a seed. Static caps are what DISC admits while somebody waits at 64, on
another seed, as for the given worlds.

Reading: in how many cells do `fast` and `quality` keep their promises, and by how much misses the worst?

    python -m experiments.disc_random --worlds 0-19 --loads 16,32,64,128 --out results.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from loadwise.lab import disc
from loadwise.lab.disc import Cell, Settings, read_world, run_cell, world_names
from loadwise.sim.vllm_engine import VllmEngineSpec

IDS: tuple[str, ...] = ()
PEERS = ("vllm_alone", "static_cap", "thunderagent", "thunderagent_state", "admission_only", "oracle")
OURS = ("fast", "quality")
GIVEN = (
    "qwen-gh200",
    "qwen-gh200",
    "qwen-h200",
    "qwen-h200",
    "mistral-h200",
    "mistral-h200",
    "mistral-h200",
    "qwen-shared-gh200",
)
CAPS_SEED = 99
MADE: dict[str, dict[str, Any]] = {}


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Uniform on a logarithmic scale."""
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def draw_world(number: int) -> dict[str, Any]:
    """The world of a number, its caps not yet known."""
    rng = np.random.default_rng([621, number])
    world = read_given(str(rng.choice(GIVEN)))
    is_shared = bool(world.get("gpus"))
    turns = 46 * log_uniform(rng, 0.6, 1.3)
    shape = float(rng.choice([2.5, 4, 10]))
    work = world["workload"]
    work["turns"] = {"gamma": {"shape": shape, "mean": turns}, "min": 4, "max": 220}
    if rng.random() < 0.2:
        work["turns"] = {"lognormal": {"median": turns / 1.25, "sigma": 0.65}, "min": 4, "max": 250}
    growth = work["growth_tokens"]["lognormal"]
    growth["median"] = round(growth["median"] * log_uniform(rng, 0.5, 2.0))
    growth["sigma"] = float(rng.choice([0.4, 0.8]))
    answer = work["output_tokens"]["gamma"]
    answer["mean"] = round(answer["mean"] * log_uniform(rng, 0.7, 1.3))
    work["tool_s"] = {"exponential": round(log_uniform(rng, 2.0, 10.0), 1)}
    if rng.random() < 0.3:
        work["joint"] = {"turns": 0.3, "growth_tokens": 0.2, "output_tokens": 0.2}
    work["context_limit_tokens"] = 120_000
    ratio = float(rng.uniform(1.0, 2.2))
    dear, cheap = world["gap"]["dear"], world["gap"]["cheap"]
    world["truth"]["turns_ratio"] = {cheap: round(ratio, 2)}
    prefers, spread = [(0.99, 0.1), (0.86, 0.2), (0.7, 0.15), (0.5, 0.02)][rng.choice(4, p=[0.4, 0.3, 0.15, 0.15])]
    world["gap"] |= {"prefers": prefers, "spread": spread}
    capacity = log_uniform(rng, 0.5, 2.0)
    _priors(world, turns * (growth["median"] * math.exp(growth["sigma"] ** 2 / 2) + answer["mean"]), ratio, rng)
    kind = "shared" if is_shared else "apart"
    if not is_shared:
        MADE["drawn"] = {**json.loads(json.dumps(world)), "caps": {dear: 32, cheap: 32}}
        made = disc.scenario_of(Cell(world="drawn", preset="oracle", load=8, seed=1))
        for name in ("dear", "cheap"):
            engine = made.engine_spec(name)
            assert isinstance(engine, VllmEngineSpec)
            world["engines"][name]["num_gpu_blocks"] = max(int(engine.n_blocks * capacity), 64)
        if rng.random() < 0.25:
            twin = str(rng.choice(["dear", "cheap"]))
            kind = f"two {twin}"
            backend = next(b for b in world["pool"]["backends"] if b["name"] == twin)
            world["pool"]["backends"].append({**backend, "name": f"{twin}2"})
            world["engines"][f"{twin}2"] = dict(world["engines"][twin])
    said = (
        f"{world['name']} {kind} kv x{capacity:.2f} turns {turns:.0f}/{shape:g} growth {growth['median']} "
        f"out {answer['mean']} gap {work['tool_s']['exponential']} ratio {ratio:.1f} prefers {prefers}"
    )
    world["name"] = f"random {number}"
    world["said"] = said
    return world


def _priors(world: dict[str, Any], peak: float, ratio: float, rng: np.random.Generator) -> None:
    """What the pool file believes: the middle, wrong by a factor."""
    models = world["pool"]["models"]
    for name, times in ((world["gap"]["dear"], 1.0), (world["gap"]["cheap"], ratio)):
        models[name]["expected_tokens"] = round(peak * times * log_uniform(rng, 0.6, 1.6))
        models[name]["expected_run_s"] = round(640 * log_uniform(rng, 0.6, 1.6))


read_given = read_world


def read_made(name: str) -> dict[str, Any]:
    """A drawn world, or a given one."""
    if name in MADE:
        world: dict[str, Any] = json.loads(json.dumps(MADE[name]))
        world.pop("said", None)
        return world
    return read_given(name)


def make_world(number: int, caps_by_world: dict[str, dict[str, int]]) -> str:
    """Draw a world, and find its caps where they are not known yet."""
    name = f"r{number}"
    world = draw_world(number)
    dear, cheap = world["gap"]["dear"], world["gap"]["cheap"]
    MADE[name] = {**world, "caps": {dear: 64, cheap: 64}}
    if name not in caps_by_world:
        found = run_cell(Cell(world=name, preset="oracle", load=64, seed=CAPS_SEED))
        caps_by_world[name] = {
            dear: max(round(found.admitted_dear), 1) if found.admitted_dear else 64,
            cheap: max(round(found.admitted_cheap), 1) if found.admitted_cheap else 64,
        }
    MADE[name]["caps"] = caps_by_world[name]
    return name


def main() -> None:
    """Run what is asked, one line a cell, and skip what the file has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="0-19", help="numbers: 0-19, or 3,5,8")
    parser.add_argument("--given", default="", help="given worlds instead, comma separated, or all")
    parser.add_argument("--presets", default=",".join((*PEERS, *OURS)))
    parser.add_argument("--loads", default="16,32,64,128")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--router", default="{}", help="keys of `router:` that win, as JSON")
    parser.add_argument("--tag", default="")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    disc.read_world = read_made
    done, caps = read_out(asked.out)
    began = time.monotonic()
    given = list(world_names()) if asked.given == "all" else [n for n in asked.given.split(",") if n]
    settings = Settings(router=json.loads(asked.router))
    with asked.out.open("a") as out:
        for number in range(len(given)) if given else numbers_of(asked.worlds):
            name = given[number] if given else make_world(number, caps)
            for cell in _cells(name, asked, settings):
                key = (name, cell.preset + asked.tag, cell.load, cell.seed)
                if key in done:
                    continue
                if time.monotonic() - began > asked.seconds:
                    return
                began_cell = time.process_time()
                result = run_cell(cell)
                row = {"world": name, "preset": key[1], "load": cell.load, "seed": cell.seed}
                row |= {f: getattr(result, f) for f in result.__struct_fields__}
                row |= {"cpu_s": round(time.process_time() - began_cell, 2)}
                if name in caps:
                    row |= {"caps": caps[name], "said": MADE[name]["said"]}
                out.write(json.dumps(row) + "\n")
                out.flush()


def numbers_of(text: str) -> list[int]:
    """Numbers of worlds, as the option names them.

    >>> numbers_of("0-2,5")
    [0, 1, 2, 5]
    """
    spans = [part.partition("-") for part in text.split(",")]
    return [n for low, _, high in spans for n in range(int(low), int(high or low) + 1)]


def _cells(name: str, asked: argparse.Namespace, settings: Settings) -> Iterable[Cell]:
    for seed in (int(s) for s in asked.seeds.split(",")):
        for load in (int(n) for n in asked.loads.split(",")):
            for preset in asked.presets.split(","):
                own = settings if preset in OURS else Settings()
                yield Cell(world=name, preset=preset, load=load, seed=seed, settings=own)


def read_out(path: Path) -> tuple[dict[tuple[str, str, int, int], dict[str, Any]], dict[str, dict[str, int]]]:
    """Rows by cell, and caps by world."""
    rows: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    caps: dict[str, dict[str, int]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["world"], row["preset"], row["load"], row["seed"]] = row
            if "caps" in row:
                caps[row["world"]] = row["caps"]
    return rows, caps


if __name__ == "__main__":
    main()
