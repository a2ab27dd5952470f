"""Fit an engine's constants to a few measurements of it.

Seven closed-loop cells of two minutes each are enough for seven constants (shares of the peak for weights, products, KV
and attention; seconds per step, per layer and per request), because each is dominated by another one. Least squares
on relative throughput errors, in logarithms, with log-normal priors around a starting row, by Levenberg and Marquardt.
A cell is simulated, not put into a formula: queueing, chunked prompts and a full KV pool are part of what was measured.

Reference: D. W. Marquardt, J. Soc. Indust. Appl. Math. 11 (1963), 431-441.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .compiled import HAS_NUMBA
from .fast_run import run_fast
from .hardware import Constants, HardwareSpec
from .programs import Programs
from .vllm_engine import VllmEngineSpec

FITTED = ("weights", "compute", "kv", "attention", "fixed_s", "layer_s", "request_s")
_PRIOR_SIGMA = (0.2, 0.3, 0.2, 0.3, 0.5, 0.5, 0.7)
_ERROR_SIGMA = 0.03
"""What a measured throughput is trusted to."""
_STEP = 1e-2
"""Of the numerical derivative, in logarithms: throughput is not smooth below that."""

Vector = npt.NDArray[np.float64]


class Cell(Fact, frozen=True, kw_only=True):
    """One measurement: so many users, each sending its next request when its last one is answered."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    output_tokens_per_s: float
    """Measured, with an empty prefix cache or prompts that do not repeat."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cell {name} is {getattr(self, name)!r}; it must be >= 1")
        if not (math.isfinite(self.output_tokens_per_s) and self.output_tokens_per_s > 0):
            raise ConfigError(
                f"cell output_tokens_per_s is {self.output_tokens_per_s!r}; it must be a finite number > 0"
            )


class Calibration(Fact, frozen=True, kw_only=True):
    """Fitted constants and what they are worth."""

    constants: Constants
    errors: list[float]
    """Simulated over measured throughput less one, by cell."""
    mean_error: float
    """Mean of their absolute values."""
    max_error: float
    n_rounds: int


def simulate_cell(cell: Cell, spec: VllmEngineSpec, *, is_compiled: bool = HAS_NUMBA) -> float:
    """Output tokens per second of a cell: five rounds of its users, at least 50 requests, ramps included."""
    n = max(50, 5 * cell.concurrency)
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
    engine = msgspec.structs.replace(spec, step=hardware.step)
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
    if len(cells) < 3:
        raise ConfigError(f"{len(cells)} cells were measured; a fit needs at least 3, better 7 of different shape")
    begin = np.log([getattr(start, name) for name in FITTED])

    def residuals(x: Vector) -> Vector:
        fitted = msgspec.structs.replace(hardware, constants=_constants(start, x))
        errors = np.array(cell_errors(cells, fitted, spec, is_compiled=is_compiled))
        return np.concatenate([errors / _ERROR_SIGMA, (x - begin) / np.array(_PRIOR_SIGMA)])

    x, n_rounds = _least_squares(residuals, begin, max_rounds)
    constants = _constants(start, x)
    errors = cell_errors(cells, msgspec.structs.replace(hardware, constants=constants), spec, is_compiled=is_compiled)
    return Calibration(
        constants=constants,
        errors=errors,
        mean_error=float(np.mean(np.abs(errors))),
        max_error=float(np.max(np.abs(errors))),
        n_rounds=n_rounds,
    )


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
