"""Does an emulated engine, streaming over HTTP in real time, keep the simulator's time?

python -m bench.emulator [--json] [--quick]

Eight agent programs of several turns with a common system prompt, on a vLLM engine whose cache is too small for all of
them, once in virtual time and once against `loadwise emulate` at 1x: its own process, loopback, every token streamed.
Call latencies, times to the first and between tokens, makespan and hits must be within 5 % of the simulated ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import yaml

from bench import result
from bench.agents import Answered, Events, Run, Script, Turn, agreement, closed_loop, draw, figures, live, simulated
from loadwise.emulator.metrics import read_signals
from loadwise.emulator.remote import Writer
from loadwise.sim.engine import EngineRequest
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec
from loadwise.wire.client import Upstream

# Qwen3-8B on an H100, with the KV of a third of one: eight programs of up to 10,000 tokens do not fit.
STEP = StepCost(
    fixed_s=2.04e-3,
    weights_s=6.03e-3,
    gemm_s_per_token=1.952e-5,
    kv_s_per_token=5.869e-8,
    attention_s_per_pair=1.0843e-9,
    request_s=1e-5,
)
SPEC = VllmEngineSpec(num_gpu_blocks=2400, step=STEP, max_num_batched_tokens=2048)
N_PROGRAMS = 8
WITHIN = 0.05
JUDGED = (
    "latency_mean_s",
    "latency_p95_s",
    "first_token_mean_s",
    "between_tokens_mean_s",
    "makespan_s",
    "hit_tokens",
)


def script(*, is_quick: bool) -> Script:
    """The programs: about 20 or 50 seconds of them."""
    return draw(
        N_PROGRAMS,
        6 if is_quick else 14,
        first=(2000, 4000),
        growth=(200, 900),
        output=(60, 240),
        gap_s=0.5,
        shared_tokens=1008,
        seed=1,
    )


class EmulatorEndpoint:
    """An emulated engine: prompts are text, four characters a token."""

    def __init__(self, url: str) -> None:
        self._upstream = Upstream(url)
        self._writer = Writer()
        self._n = 0
        self._context: dict[int, int] = {}

    async def ask(self, program: int, turn: Turn, script: Script, hear: Callable[[int], None]) -> Answered:
        known = self._context.get(program, 0)
        self._n += 1
        request = EngineRequest(
            request_id=self._n,
            program_id=f"p{program}",
            prompt_tokens=known + turn.growth_tokens,
            output_tokens=turn.output_tokens,
            prefix_tokens=known,
            shared_tokens=script.shared_tokens,
        )
        body = {
            "model": "m",
            "prompt": self._writer.open(request),
            "max_tokens": turn.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        said: list[str] = []
        usage: dict[str, Any] = {}

        def on_event(data: bytes) -> None:
            chunk = msgspec.json.decode(data)
            for choice in chunk["choices"]:
                said.append(choice["text"])
                hear(len(choice["text"]) // 4)
            usage.update(chunk.get("usage") or {})

        events = Events(on_event)
        head = b"content-type: application/json\r\n"
        self._upstream.send(b"POST", b"/completions", head, msgspec.json.encode(body), events)
        await events.over
        self._writer.close(request, "".join(said))
        self._context[program] = request.prompt_tokens + turn.output_tokens
        return Answered(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])

    async def signals(self) -> Mapping[str, float]:
        return read_signals((await self._upstream.get("/metrics", from_root=True)).body.decode())

    async def close(self) -> None:
        """Hang up."""
        await self._upstream.close()


@contextlib.contextmanager
def emulator() -> Iterator[str]:
    """`loadwise emulate` in a process of its own; gives its URL."""
    scenario = {
        "scenario": 1,
        "name": "bench",
        "n_programs": 1,
        "pool": {"models": {"m": {}}, "backends": [{"name": "a", "model": "m"}]},
        "engines": {"a": msgspec.to_builtins(SPEC)},
        "workload": {"arrivals": {"kind": "closed", "n_agents": 1}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.yaml"
        path.write_text(yaml.safe_dump(scenario))
        argv = [sys.executable, "-m", "loadwise", "emulate", "--scenario", str(path), "--json"]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["urls"]["a"]
        finally:
            process.terminate()
            process.wait(timeout=10)
            if process.stdout is not None:
                process.stdout.close()


async def emulated(url: str, asked: Script) -> Run:
    """One run in real time."""
    endpoint = EmulatorEndpoint(url)
    try:
        return await live(endpoint, asked, closed_loop(asked))
    finally:
        await endpoint.close()


def measure(n_runs: int, *, is_quick: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Medians over runs, and the spread of each ratio."""
    asked = script(is_quick=is_quick)
    ours = simulated(VllmEngine(SPEC), asked, closed_loop(asked))
    values = {f"simulated.{key}": value for key, value in figures(ours).items()}
    series: dict[str, list[float]] = {}
    for _ in range(n_runs):
        with emulator() as url:
            theirs = uvloop.run(emulated(url, asked))
        found = figures(theirs)
        for key, value in found.items():
            series.setdefault(f"emulated.{key}", []).append(value)
        for key in JUDGED:
            series.setdefault(f"off.{key}", []).append(found[key] / values[f"simulated.{key}"] - 1)
        for key, value in agreement(ours, theirs).items():
            series.setdefault(key, []).append(value)
    values |= {key: statistics.median(found) for key, found in series.items()}
    return values, {key: [min(found), max(found)] for key, found in series.items() if len(found) > 1}


def checks(values: Mapping[str, float]) -> list[dict[str, Any]]:
    """Everything that is judged is within 5 %."""
    keys = [f"off.{key}" for key in JUDGED]
    found = [{"key": key, "op": "abs <=", "bound": WITHIN, "holds": abs(values[key]) <= WITHIN} for key in keys]
    error = values["token_time_error_mean"]
    return [*found, {"key": "token_time_error_mean", "op": "<=", "bound": WITHIN, "holds": error <= WITHIN}]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one run of fewer turns; done within a minute")
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="runs in real time (default 5; quick: 1)")
    arguments = parser.parse_args()
    n_runs = arguments.runs or (1 if arguments.quick else 5)
    values, spread = measure(n_runs, is_quick=arguments.quick)
    config = {
        "load_average": os.getloadavg()[0],
        "quick": arguments.quick,
        "n_runs": n_runs,
        "engine": msgspec.to_builtins(SPEC),
        "n_programs": N_PROGRAMS,
        "scale": 1.0,
    }
    report = result.build("emulator", values=values, config=config, seeds=[1], ci95=spread, checks=checks(values))
    result.show(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
