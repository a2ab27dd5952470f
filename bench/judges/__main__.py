"""Real engines, and another simulator, judge ours: the same scripted programs on both, compared call by call.

python -m bench.judges [--json] [--quick] [--judge vllm,dynamo,llamacpp]

Two runs of each judge. `turns`: eight growing programs asked one call at a time in a random order, in a KV space for
two or three of them: what is found in the cache does not depend on how long anything takes, so every call's hit must
be equal. `loop`: all of them at once, with gaps, on our engine after it was calibrated to the judge by `sim.calibrate`:
hits, preemptions, order of first tokens, KV usage and latencies. Dynamo's mocker says random words and does not find
them again, so its prompts do not repeat answers. llama.cpp has slots and no blocks, so it is compared with a model of
slots (`slots`), in the first run only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from bench import result
from bench.agents import Run, Script, agreement, closed_loop, draw, figures, in_turn, live, simulated
from bench.judges.fit import fit, measure_cells
from bench.judges.servers import JUDGES, LLAMA_SLOTS, Absent, Judge, is_alone
from bench.judges.slots import predicted_hits
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

CELLS = [(64, 32, 1), (64, 32, 4), (64, 32, 8), (512, 4, 1), (512, 4, 4), (900, 16, 4), (256, 48, 8)]
QUICK_CELLS = [(64, 32, 1), (64, 32, 8), (512, 4, 2)]


class Verdict(NamedTuple):
    """Of one judge: its figures, ours, by key, and what must hold."""

    theirs: dict[str, float]
    ours: dict[str, float]
    checks: list[dict[str, Any]]
    config: dict[str, Any]


def turns_script(*, is_quick: bool) -> Script:
    """Programs whose contexts together are several times the KV space."""
    n_turns = 5 if is_quick else 9
    return draw(8, n_turns, first=(250, 450), growth=(40, 160), output=(6, 24), gap_s=0.0, shared_tokens=100, seed=2)


def loop_script(*, is_quick: bool) -> Script:
    """Programs that run at once; their answers are long enough to outgrow what they were let in with."""
    n_turns = 3 if is_quick else 7
    return draw(8, n_turns, first=(250, 450), growth=(40, 160), output=(24, 96), gap_s=0.3, shared_tokens=100, seed=3)


def judge_engine(judge: Judge, spec: VllmEngineSpec, *, is_quick: bool) -> Verdict:
    """A judge that has blocks, as ours."""
    turns, loop = (
        make(is_quick=is_quick)._replace(keeps_replies=judge.keeps_replies) for make in (turns_script, loop_script)
    )
    with judge.open() as open_endpoint:
        asyncio.run(run_live(open_endpoint(7), draw(2, 2, first=(64, 64), growth=(8, 8), output=(4, 4), gap_s=0.0)))
        cells = asyncio.run(measure_cells(open_endpoint, QUICK_CELLS if is_quick else CELLS))
        asked = asyncio.run(run_live(open_endpoint(1), turns, in_order=True))
        at_once = asyncio.run(run_live(open_endpoint(2), loop))
    fitted = fit(cells, spec)
    ours_asked = simulated(VllmEngine(fitted.spec), turns, in_turn(turns))
    ours_at_once = simulated(VllmEngine(fitted.spec), loop, closed_loop(loop))
    theirs: dict[str, float] = {}
    ours: dict[str, float] = {}
    for phase, a, b in (("turns", ours_asked, asked), ("loop", ours_at_once, at_once)):
        ours |= {f"{judge.name}.{phase}.{key}": value for key, value in figures(a).items()}
        theirs |= {f"{judge.name}.{phase}.{key}": value for key, value in figures(b).items()}
        ours |= {f"{judge.name}.{phase}.{key}": value for key, value in agreement(a, b).items()}
    ours |= {f"{judge.name}.fit.mean_error": fitted.mean_error, f"{judge.name}.fit.max_error": fitted.max_error}
    checks = [equal(f"{judge.name}.turns.calls_with_equal_hits", 1.0, ours)]
    config = {"engine": msgspec.to_builtins(fitted.spec), "cells": msgspec.to_builtins(cells), "what": judge.what}
    return Verdict(theirs, ours, checks, config)


def judge_slots(judge: Judge, *, is_quick: bool) -> Verdict:
    """llama.cpp: what a model of its slots says that each call finds."""
    script = draw(
        5,
        4 if is_quick else 9,
        first=(250, 450),
        growth=(40, 160),
        output=(6, 24),
        gap_s=0.0,
        shared_tokens=60,
        seed=4,
    )
    with judge.open() as open_endpoint:
        asked = asyncio.run(run_live(open_endpoint(1), script, in_order=True))
    predicted = predicted_hits(script, in_turn(script), LLAMA_SLOTS)
    theirs = {f"{judge.name}.turns.{key}": value for key, value in figures(asked).items()}
    found = {(call.program, call.turn): call.cached_tokens for call in asked.calls}
    n_equal = sum(found[place] == hit for place, hit in predicted.items())
    ours = {
        f"{judge.name}.turns.hit_tokens": float(sum(predicted.values())),
        f"{judge.name}.turns.hit_ratio": sum(predicted.values()) / figures(asked)["prompt_tokens"],
        f"{judge.name}.turns.calls_with_equal_hits": n_equal / len(predicted),
    }
    checks = [equal(f"{judge.name}.turns.calls_with_equal_hits", 1.0, ours)]
    return Verdict(theirs, ours, checks, {"slots": LLAMA_SLOTS, "what": judge.what})


async def run_live(endpoint: Any, script: Script, *, in_order: bool = False) -> Run:
    """One run of a script; the endpoint is closed at its end."""
    try:
        return await live(endpoint, script, in_turn(script) if in_order else closed_loop(script))
    finally:
        await endpoint.close()


def equal(key: str, bound: float, values: Mapping[str, float]) -> dict[str, Any]:
    """A check that a figure is what it must be."""
    return {"key": key, "op": "==", "bound": bound, "holds": values[key] == bound}


def hear(names: list[str], *, is_quick: bool, say: Callable[[str], None]) -> tuple[dict[str, Verdict], dict[str, str]]:
    """Every judge that can be had, and why the others cannot."""
    verdicts, absent = {}, {}
    for name in names:
        judge = JUDGES[name]
        say(f"{name}: {judge.what}")
        try:
            if name == "dynamo" and not is_alone():
                verdicts[name] = in_own_network(name, is_quick=is_quick)
            elif judge.spec is None:
                verdicts[name] = judge_slots(judge, is_quick=is_quick)
            else:
                verdicts[name] = judge_engine(judge, judge.spec, is_quick=is_quick)
        except Absent as error:
            absent[name] = str(error)
            say(f"{name}: not asked: {error}")
    return verdicts, absent


def in_own_network(name: str, *, is_quick: bool) -> Verdict:
    """Ask a judge that listens on every address, in a network that has loopback only.

    Raises:
        Absent: such a network cannot be made here, or the judge cannot be had.
    """
    command = f"ip link set lo up && exec {sys.executable} -m bench.judges --json --judge {name}"
    command += " --quick" if is_quick else ""
    ran = subprocess.run(["unshare", "-rn", "sh", "-c", command], capture_output=True, text=True, check=False)
    if ran.returncode or not ran.stdout:
        raise Absent(f"{name} in a network of its own: {ran.stderr.strip()[-600:]}")
    found = json.loads(ran.stdout)
    return Verdict(found["peers"][name], found["values"], found["checks"], found["config"][name])


def show(verdicts: Mapping[str, Verdict]) -> None:
    """A table for readers: engine, ours, difference."""
    for verdict in verdicts.values():
        print(f"{'':<48}{'engine':>14}{'ours':>14}{'difference':>12}")
        for key, ours in verdict.ours.items():
            if key not in verdict.theirs:
                print(f"{key:<48}{'':>14}{ours:>14.3f}")
                continue
            theirs = verdict.theirs[key]
            off = f"{ours / theirs - 1:+.1%}" if theirs else f"{ours - theirs:+.3f}"
            print(f"{key:<48}{theirs:>14.3f}{ours:>14.3f}{off:>12}")
        for check in verdict.checks:
            print("holds " if check["holds"] else "MISSED", check["key"], check["op"], check["bound"])
        print()


def main() -> int:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer turns and cells; vLLM alone needs 90 s to start")
    parser.add_argument("--judge", default=",".join(JUDGES), help="comma-separated: " + ", ".join(JUDGES))
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.judge.split(",")]
    unknown = [name for name in names if name not in JUDGES]
    if unknown:
        parser.error(f"unknown judge {unknown[0]!r}; known are {', '.join(JUDGES)}")
    verdicts, absent = hear(names, is_quick=arguments.quick, say=lambda text: print(text, file=sys.stderr))
    print(f"{len(absent)} of {len(names)} judges absent", *absent.values(), sep="\n  ", file=sys.stderr)
    if not verdicts:
        return 1
    if not arguments.json:
        show(verdicts)
        return 0
    values = {key: value for verdict in verdicts.values() for key, value in verdict.ours.items()}
    config = {
        "load_average": os.getloadavg()[0],
        "quick": arguments.quick,
        "absent": absent,
        **{name: verdict.config for name, verdict in verdicts.items()},
    }
    report = result.build(
        "judges",
        values=values,
        config=config,
        seeds=[1, 2, 3, 4],
        peers={name: verdict.theirs for name, verdict in verdicts.items()},
        checks=[check for verdict in verdicts.values() for check in verdict.checks],
    )
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
