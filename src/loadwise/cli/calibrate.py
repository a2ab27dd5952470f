"""`loadwise calibrate`: what a step of a running engine costs, from a few measurements of it."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, plain, put, put_json, say

if TYPE_CHECKING:
    from loadwise.lab.calibration import Measured
    from loadwise.sim.vllm_engine import VllmEngineSpec

WORST_ERROR = 0.15
"""On average. What is farther off was disturbed, or is no engine with continuous batches."""

DESCRIPTION = (
    "Measure a running engine by some 400 requests, fit the simulator's step time to it, and say how far it is off."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where measurements come from, what is known of the engine, where the result goes."""
    add = parser.add_argument
    add("--url", metavar="URL", help="the engine's OpenAI-compatible API, like http://127.0.0.1:8000/v1")
    add("--measurements", metavar="FILE.csv", help="measurements made before, instead of an engine")
    add("--model", metavar="NAME", help="model to ask (default: the first that the engine lists)")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the engine's API key")
    add("--timeout", type=float, default=120.0, metavar="S", help="of one request (default 120)")
    add("--max-concurrency", type=int, default=32, metavar="N", help="most requests at once (default 32)")
    add("--max-prompt-tokens", type=int, default=6000, metavar="N", help="longest prompt (default 6000)")
    add("--times", type=int, default=2, metavar="N", help="measure each shape so often; the fastest counts (default 2)")
    add("--gpu", metavar="NAME", help="fit shares of this GPU's peak instead of seconds; needs --shape")
    add("--shape", metavar="NAME", help="model of the simulator's table, like qwen3-8b")
    add("--precision", choices=("bf16", "fp8"), default="bf16", help="of the weights (default bf16)")
    add("--num-gpu-blocks", type=int, metavar="N", help="KV blocks (default: what the engine exports)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="most requests that run at once (default 256)")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="most tokens of a step (default 8192)")
    add("--out", metavar="FILE.yaml", help="write the engine of a scenario there")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure or read, fit, judge by what was held out, report."""
    if (arguments.url is None) == (arguments.measurements is None):
        raise ConfigError("give either --url of a running engine or --measurements of one")
    if (arguments.gpu is None) != (arguments.shape is None):
        raise ConfigError("--gpu and --shape belong together")
    spec = _spec(arguments)
    measured, blocks = _measured(arguments)
    if blocks is not None and arguments.num_gpu_blocks is None:
        import msgspec

        spec = msgspec.structs.replace(spec, num_gpu_blocks=blocks[0], block_size=blocks[1])
    result = _fit(arguments, measured, spec)
    if arguments.out is not None:
        from pathlib import Path

        Path(arguments.out).write_text(_yaml(result["engine"]), encoding="utf-8")
    if arguments.json:
        put_json(result)
    else:
        put(_yaml(result["engine"]).rstrip("\n"))
    say(_verdict(result))
    return 0


def _spec(arguments: argparse.Namespace) -> "VllmEngineSpec":
    """The engine's limits. A batch must be larger than the number of requests for the fast core."""
    from loadwise.sim.vllm_engine import VllmEngineSpec

    return VllmEngineSpec(
        num_gpu_blocks=arguments.num_gpu_blocks,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )


def _measured(arguments: argparse.Namespace) -> "tuple[Measured, tuple[int, int] | None]":
    from loadwise.lab.calibration import MAX_TIMES, Endpoint, first_model, kv_blocks, ladder, measure, read_measurements

    if arguments.measurements is not None:
        return read_measurements(arguments.measurements), None
    api_key = None
    if arguments.api_key_env is not None:
        api_key = os.environ.get(arguments.api_key_env)
        if not api_key:
            raise ConfigError(f"--api-key-env is {arguments.api_key_env!r}; no such variable is set")
    if not 1 <= arguments.times <= MAX_TIMES:
        raise ConfigError(f"--times is {arguments.times!r}; it must be in 1..{MAX_TIMES}")
    ladder(arguments.max_concurrency, arguments.max_prompt_tokens)  # nobody is asked with bad limits
    url = arguments.url.rstrip("/")
    endpoint = Endpoint(url=url, model=arguments.model or "", api_key=api_key, timeout_s=arguments.timeout)
    if arguments.model is None:
        endpoint = Endpoint(url=url, model=first_model(url, api_key), api_key=api_key, timeout_s=arguments.timeout)
    blocks = kv_blocks(endpoint)
    n_blocks, block_size = blocks or (arguments.num_gpu_blocks, 16)
    kv_tokens = None if n_blocks is None else n_blocks * block_size
    rungs = ladder(arguments.max_concurrency, arguments.max_prompt_tokens, kv_tokens)
    return measure(endpoint, rungs, say, n_times=arguments.times), blocks


def _fit(arguments: argparse.Namespace, measured: "Measured", spec: "VllmEngineSpec") -> dict[str, Any]:
    """The fit, as plain data."""
    import msgspec

    from loadwise.lab.calibration import mean_absolute
    from loadwise.sim.calibrate import Fit, calibrate, calibrate_step, step_errors
    from loadwise.sim.hardware import HardwareSpec, constants_for

    limits = {"max_num_seqs": spec.max_num_seqs, "max_num_batched_tokens": spec.max_num_batched_tokens}
    engine: dict[str, Any] = {"kind": "vllm", **limits}
    fit: Fit
    if arguments.gpu is None:
        own = calibrate_step(measured.fit, spec)
        fit, step, constants = own, own.step, plain(own.step)
        engine["step"] = {name: value for name, value in constants.items() if value}
        engine |= {"num_gpu_blocks": spec.n_blocks, "block_size": spec.block_tokens}
    else:
        hardware = HardwareSpec(gpu=arguments.gpu, model=arguments.shape, precision=arguments.precision)
        spec = msgspec.structs.replace(
            spec, num_gpu_blocks=spec.num_gpu_blocks or hardware.kv_tokens // spec.block_tokens
        )
        shares = calibrate(measured.fit, hardware, constants_for(arguments.gpu, arguments.precision), spec)
        fit, step = shares, msgspec.structs.replace(hardware, constants=shares.constants).step
        constants = plain(shares.constants)
        named = {"gpu": arguments.gpu, "model": arguments.shape, "precision": arguments.precision}
        engine["hardware"] = named | {"constants": constants}
        if arguments.num_gpu_blocks is not None:
            engine["num_gpu_blocks"] = arguments.num_gpu_blocks
    errors = step_errors(measured.held_out, step, spec)
    return {
        "name": "calibrate",
        "constants": constants,
        "fit_error": fit.mean_error,
        "fit_max_error": fit.max_error,
        "n_fit": len(measured.fit),
        "held_out_error": mean_absolute(errors) if errors else None,
        "held_out_max_error": max(map(abs, errors)) if errors else None,
        "n_held_out": len(errors),
        "n_rounds": fit.n_rounds,
        "cells": [
            plain(cell) | {"error": error, "is_held_out": is_held_out}
            for cells, found, is_held_out in ((measured.fit, fit.errors, False), (measured.held_out, errors, True))
            for cell, error in zip(cells, found, strict=True)
        ],
        "engine": engine,
    }


def _yaml(engine: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(engine, sort_keys=False)


def _verdict(result: dict[str, Any]) -> str:
    text = f"fitted to {result['n_fit']} cells: {result['fit_error']:.1%} off on average"
    text += f", {result['fit_max_error']:.1%} at most"
    if result["n_held_out"]:
        text += f"; {result['n_held_out']} cells that it has not seen: {result['held_out_error']:.1%} on average"
    worst = max(result["fit_error"], result["held_out_error"] or 0.0)
    if worst > WORST_ERROR:
        text += "; this is no good fit: measure again without other work, and look at the cells (--json)"
    return text
