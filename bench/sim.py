"""How many model calls per second the simulator's engine core does, beside a prototype's if one is given.

python -m bench.sim [--json] [--quick] [--prototype FILE]

Closed loops of agent programs (about 40 turns, 200 output tokens) on engines like Qwen3-8B on an H100: 8 engines with
128 programs, one engine that thrashes, one with a large batch, and the plain-Python core. Only the core's own run is
timed: neither the making of programs nor compilation. Router and world are not in it. Both cores run the same programs
in turn, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from bench import result
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.fast_run import FastRun
from loadwise.sim.programs import Programs, pack
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngineSpec

STEP = StepCost(
    fixed_s=2.04e-3,
    weights_s=6.03e-3,
    gemm_s_per_token=1.952e-5,
    kv_s_per_token=5.869e-8,
    attention_s_per_pair=1.0843e-9,
    request_s=1e-5,
)
SPEC = VllmEngineSpec(num_gpu_blocks=377_024 // 16, step=STEP)
SHARED_TOKENS = 1008
LEAST_CALLS_PER_S = 500_000.0
LEAST_PLAIN_CALLS_PER_S = 10_000.0
LEAST_SPEEDUP = 1.2


class Case(NamedTuple):
    """One closed loop."""

    n_programs: int
    n_agents: int
    n_engines: int
    n_pools: int
    """KV of an engine, in multiples of an H100's."""


CASES = {
    "engines8_programs128": Case(3000, 128, 8, 1),
    "thrash": Case(2000, 24, 1, 1),
    "large_batch": Case(2000, 64, 1, 4),
}
PLAIN = Case(60, 24, 1, 1)


def draw(n_programs: int, seed: int = 0) -> list[tuple[list[int], list[int], list[float]]]:
    """Agent programs: turns, appended tokens, outputs and tool times with long tails."""
    rng = np.random.default_rng(seed)
    programs = []
    for _ in range(n_programs):
        n_turns = max(2, int(rng.gamma(4, 10)))
        growth = np.maximum(rng.exponential(500, n_turns), 1).astype(int)
        growth[0] += 3000
        output = np.maximum(rng.gamma(2, 100, n_turns), 1).astype(int)
        programs.append((growth.tolist(), output.tolist(), rng.exponential(3.0, n_turns).tolist()))
    return programs


def ours_s(case: Case, programs: Programs, *, is_compiled: bool) -> float:
    """Seconds of one run of our core."""
    spec = VllmEngineSpec(num_gpu_blocks=SPEC.n_blocks * case.n_pools, step=STEP)
    run = FastRun([spec] * case.n_engines, programs, case.n_agents, is_compiled=is_compiled)
    began_s = time.perf_counter()
    run.advance()
    took_s = time.perf_counter() - began_s
    if len(run.log()) != programs.n_calls:
        raise RuntimeError(f"{len(run.log())} of {programs.n_calls} calls were done")
    return took_s


def load_prototype(path: Path) -> ModuleType | None:
    """The prototype as a module, or None where it is not there or numba is not."""
    spec = importlib.util.spec_from_file_location("simulators_proto", path)
    if not HAS_NUMBA or not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # numba's cache on disk refers to it by name
    spec.loader.exec_module(module)
    return module


def prototype_s(prototype: ModuleType, case: Case, drawn: list[Any]) -> float:
    """Seconds of one run of the prototype on the same programs, as it times itself."""
    costs = [STEP.fixed_s, STEP.weights_s, STEP.gemm_s_per_token, STEP.kv_s_per_token]
    costs += [STEP.attention_s_per_pair, STEP.request_s, STEP.kv_s_per_token]
    arrays = [tuple(np.array(column) for column in program) for program in drawn]
    blocks = [SPEC.n_blocks * case.n_pools] * case.n_engines
    run = prototype.simulate(arrays, case.n_agents, [costs] * case.n_engines, blocks, shared=SHARED_TOKENS)
    return float(run["wall"])


def measure(
    case: Case, prototype: ModuleType | None, n_runs: int, *, is_compiled: bool = True
) -> tuple[float, float | None]:
    """Calls per second of our core and of the prototype: medians over runs in turn."""
    drawn = draw(case.n_programs)
    programs = pack(drawn, SHARED_TOKENS)
    ours, theirs = [], []
    for i in range(n_runs + 1):
        seconds = ours_s(case, programs, is_compiled=is_compiled)
        proto_s = None if prototype is None else prototype_s(prototype, case, drawn)
        if i:  # the first run compiles and warms up
            ours.append(programs.n_calls / seconds)
            theirs += [] if proto_s is None else [programs.n_calls / proto_s]
    return statistics.median(ours), statistics.median(theirs) if theirs else None


def measure_all(prototype: ModuleType | None, n_runs: int) -> tuple[dict[str, float], dict[str, float]]:
    """Our figures and the prototype's, by key."""
    values: dict[str, float] = {}
    peer: dict[str, float] = {}
    for name, case in CASES.items():
        ours, theirs = measure(case, prototype, n_runs, is_compiled=HAS_NUMBA)
        values[f"calls_per_s.{name}"] = round(ours)
        if theirs is not None:
            peer[f"calls_per_s.{name}"] = round(theirs)
            values[f"speedup.{name}"] = round(ours / theirs, 3)
    plain, _ = measure(PLAIN, None, n_runs, is_compiled=False)
    values["calls_per_s.python"] = round(plain)
    return values, peer


def checks(values: dict[str, float]) -> list[dict[str, Any]]:
    """The bounds that the figures must keep."""
    bounds = {"calls_per_s.python": LEAST_PLAIN_CALLS_PER_S}
    if HAS_NUMBA:
        bounds["calls_per_s.engines8_programs128"] = LEAST_CALLS_PER_S
    bounds |= {key: LEAST_SPEEDUP for key in values if key.startswith("speedup.")}
    return [{"key": key, "op": ">=", "bound": bound, "holds": values[key] >= bound} for key, bound in bounds.items()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer programs; done within a minute")
    parser.add_argument("--prototype", type=Path, help="its file, to compare with")
    arguments = parser.parse_args()
    if arguments.quick:
        CASES.update({name: case._replace(n_programs=case.n_programs // 4) for name, case in CASES.items()})
    prototype = None if arguments.prototype is None else load_prototype(arguments.prototype)
    values, peer = measure_all(prototype, n_runs=3 if arguments.quick else 5)
    config = {
        "load_average": os.getloadavg()[0],
        "quick": arguments.quick,
        "numba": HAS_NUMBA,
        "cases": {name: case._asdict() for name, case in CASES.items()},
    }
    peers = {"prototype": peer} if peer else {}
    report = result.build("sim", values=values, config=config, seeds=[0], peers=peers, checks=checks(values))
    result.show(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
