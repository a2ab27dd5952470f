"""Our simulator's constants, fitted to a few measurements of the engine that is to judge it (`sim.calibrate`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.agents import Script, Turn, live
from loadwise.sim.calibrate import Cell, calibrate
from loadwise.sim.hardware import Constants, HardwareSpec, constants_for
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngineSpec

# What the constants are shares of. Any row serves, since every one of them is fitted.
HARDWARE = HardwareSpec(gpu="h100", model="qwen3-8b")


class Fit(NamedTuple):
    """A fitted engine and what the fit is worth."""

    spec: VllmEngineSpec
    mean_error: float
    max_error: float
    cells: list[Cell]


async def measure_cells(open_endpoint: Callable[[int], Any], shapes: list[tuple[int, int, int]]) -> list[Cell]:
    """Closed loops of prompts that do not repeat: (prompt tokens, output tokens, users)."""
    cells = []
    for number, (prompt, output, users) in enumerate(shapes):
        n = max(10, 5 * users)
        script = Script([[Turn(prompt, output, 0.0)] for _ in range(n)])
        chains = [[(p, 0) for p in range(agent, n, users)] for agent in range(users)]
        endpoint = open_endpoint(1000 + number)
        try:
            run = await live(endpoint, script, chains)
        finally:
            await endpoint.close()
        cells.append(
            Cell(
                prompt_tokens=prompt,
                output_tokens=output,
                concurrency=users,
                output_tokens_per_s=n * output / run.makespan_s,
            )
        )
    return cells


def fit(cells: list[Cell], spec: VllmEngineSpec) -> Fit:
    """Fit, from a start that the cells themselves suggest."""
    start = start_constants(rough_step(cells))
    found = calibrate(cells, HARDWARE, start, spec)
    step = msgspec.structs.replace(HARDWARE, constants=found.constants).step
    return Fit(msgspec.structs.replace(spec, step=step), found.mean_error, found.max_error, cells)


def rough_step(cells: list[Cell]) -> StepCost:
    """A step's cost by plain least squares, as if all users of a cell were always at the same place.

    A round of a cell takes users * prompt * g + output * (f + users * r + users * context * k) seconds, which is linear
    in the four constants; none may be negative, so the best of all choices of those that are not 0 is taken.
    """
    rows, seconds = [], []
    for cell in cells:
        n, context = cell.concurrency, cell.prompt_tokens + cell.output_tokens / 2
        rows.append([n * cell.prompt_tokens, *(cell.output_tokens * x for x in (1, n, n * context))])
        seconds.append(n * cell.output_tokens / cell.output_tokens_per_s)
    scaled = np.array(rows) / np.array(seconds)[:, None]
    best, least = np.zeros(4), math.inf
    for chosen in itertools.product([False, True], repeat=4):
        columns = np.flatnonzero(chosen)
        x = np.zeros(4)
        x[columns] = np.linalg.lstsq(scaled[:, columns], np.ones(len(cells)), rcond=None)[0]
        error = float(np.sum((scaled @ x - 1) ** 2))
        if (x >= 0).all() and error < least:
            best, least = x, error
    one_s = max(best[1] + best[2], 1e-5)
    gemm_s = max(best[0], one_s / 2000)
    return StepCost(
        fixed_s=max(best[1], one_s / 4),
        weights_s=one_s / 50,
        gemm_s_per_token=gemm_s,
        kv_s_per_token=max(best[3], gemm_s / 5000),
        attention_s_per_pair=gemm_s / 5000,
        request_s=max(best[2], one_s / 200),
    )


def start_constants(step: StepCost) -> Constants:
    """The constants that give this step on `HARDWARE`."""
    base = constants_for(HARDWARE.gpu, HARDWARE.precision)
    given = HARDWARE.step
    return msgspec.structs.replace(
        base,
        weights=base.weights * given.weights_s / step.weights_s,
        compute=base.compute * given.gemm_s_per_token / step.gemm_s_per_token,
        kv=base.kv * given.kv_s_per_token / step.kv_s_per_token,
        attention=base.attention * given.attention_s_per_pair / step.attention_s_per_pair,
        fixed_s=step.fixed_s * 0.9,
        layer_s=step.fixed_s * 0.1 / HARDWARE.model_facts.layers,
        request_s=step.request_s,
        host_s=0.0,
        host_request_s=0.0,
        source="a rough guess",
    )
