"""Fit an engine's constants to a few measurements of it.

Seven closed-loop cells of two minutes each are enough for seven constants (shares of the peak for weights, products, KV
and attention; seconds per step, per layer and per request), because each is dominated by another one. Least squares
on relative throughput errors, in logarithms, with log-normal priors around a starting row, by Levenberg and Marquardt.
A cell is simulated, not put into a formula: queueing, chunked prompts and a full KV pool are part of what was measured.

Where neither GPU nor model is known, a step's own costs are fitted in the same way (`calibrate_step`), from a start
that the measurements themselves suggest.

Reference: D. W. Marquardt, J. Soc. Indust. Appl. Math. 11 (1963), 431-441.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .bounds import require_within
from .compiled import HAS_NUMBA
from .fast_run import run_fast
from .hardware import Constants, HardwareSpec
from .programs import Programs
from .step_time import StepCost
from .vllm_engine import VllmEngineSpec

FITTED = ("weights", "compute", "kv", "attention", "fixed_s", "layer_s", "request_s")
_PRIOR_SIGMA = (0.2, 0.3, 0.2, 0.3, 0.5, 0.5, 0.7)
_ERROR_SIGMA = 0.03
"""What a measured throughput is trusted to."""
_STEP = 1e-2
"""Of the numerical derivative, in logarithms: throughput is not smooth below that."""

MIN_CELLS = 3
MAX_TOKENS, MAX_REQUESTS = 1_000_000, 100_000
"""Of one cell: beyond them a simulated cell would take minutes."""
STEP_FITTED = ("fixed_s", "weights_s", "gemm_s_per_token", "kv_s_per_token", "attention_s_per_pair", "request_s")
_STEP_SIGMA = (1.0, 1.0, 1.0, 1.5, 1.5, 1.0)
"""Wide: nothing is known beforehand but orders of magnitude. What measurements do not tell stays near `guess_step`,
whose ratios are those of known models and GPUs."""

Vector = npt.NDArray[np.float64]


class Cell(Fact, frozen=True, kw_only=True):
    """One measurement: so many users, each sending its next request when its last one is answered."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    output_tokens_per_s: float
    """Measured, with an empty prefix cache or prompts that do not repeat."""
    n_requests: int | None = None
    """How many were sent in all, from the first one's start to the last one's end; many where absent."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            require_within(f"cell {name}", getattr(self, name), 1, MAX_TOKENS)
        if self.n_requests is not None and not self.concurrency <= self.n_requests <= MAX_REQUESTS:
            raise ConfigError(
                f"cell n_requests is {self.n_requests!r}; it must be in concurrency..{MAX_REQUESTS}, "
                f"concurrency is {self.concurrency!r}"
            )
        if not (math.isfinite(self.output_tokens_per_s) and self.output_tokens_per_s > 0):
            raise ConfigError(
                f"cell output_tokens_per_s is {self.output_tokens_per_s!r}; it must be a finite number > 0"
            )


class Fit(Fact, frozen=True, kw_only=True):
    """What a fit is worth."""

    errors: list[float]
    """Simulated over measured throughput less one, by cell."""
    mean_error: float
    """Mean of their absolute values."""
    max_error: float
    n_rounds: int


class Calibration(Fit, frozen=True, kw_only=True):
    """Fitted shares of a GPU's peak."""

    constants: Constants


class StepCalibration(Fit, frozen=True, kw_only=True):
    """Fitted costs of a step."""

    step: StepCost


def simulate_cell(cell: Cell, spec: VllmEngineSpec, *, is_compiled: bool = HAS_NUMBA) -> float:
    """Output tokens per second of a cell, ramps included; without a number of requests five rounds, at least 50."""
    n = cell.n_requests or max(50, 5 * cell.concurrency)
    programs = Programs(
        offsets=np.arange(n + 1, dtype=np.int64),
        growth_tokens=np.full(n, cell.prompt_tokens, dtype=np.int64),
        output_tokens=np.full(n, cell.output_tokens, dtype=np.int64),
        gap_s=np.zeros(n),
    )
    return run_fast([spec], programs, cell.concurrency, is_compiled=is_compiled).output_tokens_per_s


def cell_errors(
    cells: Sequence[Cell], hardware: HardwareSpec, spec: VllmEngineSpec, *, is_compiled: bool = HAS_NUMBA
) -> list[float]:
    """Simulated over measured throughput less one, by cell, with these constants on this engine."""
    return step_errors(cells, hardware.step, spec, is_compiled=is_compiled)


def step_errors(
    cells: Sequence[Cell], step: StepCost, spec: VllmEngineSpec, *, is_compiled: bool = HAS_NUMBA
) -> list[float]:
    """The same with these costs of a step."""
    engine = msgspec.structs.replace(spec, step=step)
    return [simulate_cell(cell, engine, is_compiled=is_compiled) / cell.output_tokens_per_s - 1 for cell in cells]


def calibrate(
    cells: Sequence[Cell],
    hardware: HardwareSpec,
    start: Constants,
    spec: VllmEngineSpec,
    *,
    max_rounds: int = 12,
    is_compiled: bool = HAS_NUMBA,
) -> Calibration:
    """Fit the constants.

    Args:
        hardware: What was measured.
        start: Where the fit begins, and what its priors are centred on.
        spec: The engine's blocks and limits, as it reported them.

    Raises:
        ConfigError: too few cells.
    """
    begin = np.log([getattr(start, name) for name in FITTED])

    def errors_at(x: Vector) -> list[float]:
        fitted = msgspec.structs.replace(hardware, constants=_constants(start, x))
        return cell_errors(cells, fitted, spec, is_compiled=is_compiled)

    x, errors, n_rounds = _fit(cells, errors_at, begin, _PRIOR_SIGMA, max_rounds)
    return Calibration(constants=_constants(start, x), **_worth(errors), n_rounds=n_rounds)


def calibrate_step(
    cells: Sequence[Cell], spec: VllmEngineSpec, *, max_rounds: int = 20, is_compiled: bool = HAS_NUMBA
) -> StepCalibration:
    """Fit what a step costs, of an engine about which nothing else is known.

    Args:
        spec: The engine's blocks and limits.

    Raises:
        ConfigError: too few cells.
    """
    _require_cells(cells)
    begin = np.log([getattr(guess_step(cells), name) for name in STEP_FITTED])

    def errors_at(x: Vector) -> list[float]:
        return step_errors(cells, _step(x), spec, is_compiled=is_compiled)

    x, errors, n_rounds = _fit(cells, errors_at, begin, _STEP_SIGMA, max_rounds)
    return StepCalibration(step=_step(x), **_worth(errors), n_rounds=n_rounds)


def guess_step(cells: Sequence[Cell]) -> StepCost:
    """Costs of the right order: a step lasts what a token takes in the calmest cell, a prompt token what is left for it
    in the cell with most of them."""
    calm = min(cells, key=lambda cell: (cell.concurrency, cell.prompt_tokens / cell.output_tokens))
    step_s = calm.concurrency / calm.output_tokens_per_s
    busy = max(cells, key=lambda cell: cell.prompt_tokens * cell.output_tokens_per_s / cell.output_tokens)
    token_s = busy.output_tokens / busy.output_tokens_per_s / (busy.prompt_tokens + busy.output_tokens)
    token_s = min(token_s, step_s)
    return StepCost(
        fixed_s=0.3 * step_s,
        weights_s=0.7 * step_s,
        gemm_s_per_token=token_s,
        kv_s_per_token=step_s / 2e5,
        attention_s_per_pair=token_s / 2e4,
        request_s=step_s / 500,
    )


def _step(x: Vector) -> StepCost:
    values: dict[str, Any] = dict(zip(STEP_FITTED, (float(value) for value in np.exp(x)), strict=True))
    return StepCost(**values)


def _require_cells(cells: Sequence[Cell]) -> None:
    if len(cells) < MIN_CELLS:
        raise ConfigError(
            f"{len(cells)} cells were measured; a fit needs at least {MIN_CELLS}, better 7 of different shape"
        )


def _fit(
    cells: Sequence[Cell],
    errors_at: Callable[[Vector], list[float]],
    begin: Vector,
    sigma: tuple[float, ...],
    max_rounds: int,
) -> tuple[Vector, list[float], int]:
    _require_cells(cells)

    def residuals(x: Vector) -> Vector:
        return np.concatenate([np.array(errors_at(x)) / _ERROR_SIGMA, (x - begin) / np.array(sigma)])

    x, n_rounds = _least_squares(residuals, begin, max_rounds)
    return x, errors_at(x), n_rounds


def _worth(errors: list[float]) -> dict[str, Any]:
    return {
        "errors": errors,
        "mean_error": float(np.mean(np.abs(errors))),
        "max_error": float(np.max(np.abs(errors))),
    }


def _constants(start: Constants, x: Vector) -> Constants:
    values = dict(zip(FITTED, (float(value) for value in np.exp(x)), strict=True))
    return msgspec.structs.replace(start, **values, source=f"calibrated, from {start.source}")


def _least_squares(residuals: Callable[[Vector], Vector], x: Vector, max_rounds: int) -> tuple[Vector, int]:
    """Minimise the sum of squares; damping rises while a step does not help."""
    r, damping = residuals(x), 1e-2
    for n_rounds in range(1, max_rounds + 1):
        slopes = np.stack([(residuals(x + _STEP * unit) - r) / _STEP for unit in np.eye(len(x))], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ r
        for _ in range(8):
            trial = x - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            found = residuals(trial)
            if found @ found < r @ r:
                break
            damping *= 4
        else:
            return x, n_rounds
        gain = 1 - (found @ found) / (r @ r)
        x, r, damping = trial, found, damping / 3
        if gain < 1e-3:
            break
    return x, n_rounds
