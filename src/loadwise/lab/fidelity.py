"""`loadwise lab fidelity`: paper, ours, band; as a table and as the one JSON object of every experiment."""

from collections.abc import Sequence
from typing import Any

from loadwise import __version__
from loadwise.kernel.errors import ConfigError
from loadwise.sim.compiled import HAS_NUMBA
from loadwise.sim.fidelity import Row, fidelity

from .report import commit, machine

MAX_SEEDS = 100


def run_fidelity(n_seeds: int) -> list[Row]:
    """All rows; what papers report is averaged over seeds 0 to `n_seeds` - 1.

    Raises:
        ConfigError: too few or too many seeds.
    """
    if not 1 <= n_seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds is {n_seeds!r}; it must be in 1..{MAX_SEEDS}")
    return fidelity(range(n_seeds))


def fidelity_json(rows: Sequence[Row], n_seeds: int) -> dict[str, Any]:
    """The one object of `--json`. A figure that is not finite (nothing collapsed) is left out and its check fails."""
    finite = [row for row in rows if abs(row.ours) < float("inf")]
    return {
        "name": "lab.fidelity",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": list(range(n_seeds)),
        "config": {"numba": HAS_NUMBA, "basis": {row.key: row.basis for row in rows}},
        "values": {row.key: row.ours for row in finite},
        "ci95": {row.key: list(row.ci95) for row in rows if row.ci95 is not None},
        "peers": {"published": {row.key: row.published for row in rows if row.published is not None}},
        "checks": [{"key": row.key, "op": "in", "bound": [row.low, row.high], "holds": row.holds} for row in rows],
    }


def fidelity_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's cells, a heading first."""
    cells: list[tuple[str, ...]] = [("figure", "paper", "ours", "band", "rests on", "")]
    for row in rows:
        published = "" if row.published is None else _shown(row.published)
        band = f"{_shown(row.low)} .. {_shown(row.high)}"
        cells.append((row.key, published, _shown(row.ours), band, row.basis, "holds" if row.holds else "MISSED"))
    return cells


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
