"""A small folder of invented outcomes for the tests of the lab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TYPES = {
    "task_id": pa.string(),
    "family": pa.string(),
    "domain": pa.string(),
    "model": pa.string(),
    "agent": pa.string(),
    "trial": pa.int16(),
    "success": pa.float32(),
    "cost_usd": pa.float64(),
}
SUCCESS = {  # by family and model; `big` costs ten times `small`
    "swe": {"small": 0.3, "big": 0.8},
    "chat": {"small": 0.8, "big": 0.4},
}
PRICE = {"small": 0.01, "big": 0.1}


def row(task_id: str = "t", **values: Any) -> dict[str, Any]:
    """One run of one task, in the format's columns."""
    row = {"task_id": task_id, "family": "swe", "domain": "d", "model": "small", "agent": "a", "trial": 0}
    return {**row, "success": 1.0, "cost_usd": 0.01, **values}


def write(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "some") -> Path:
    """Write `outcomes/name.parquet`; columns that no row has are left out."""
    (folder / "outcomes").mkdir(parents=True, exist_ok=True)
    columns = [column for column in TYPES if any(column in row for row in rows)] or list(TYPES)
    arrays = {column: pa.array([row.get(column) for row in rows], TYPES[column]) for column in columns}
    pq.write_table(pa.table(arrays), folder / "outcomes" / f"{name}.parquet")
    return folder


def write_texts(folder: Path, texts: Mapping[str, str], family: str = "swe") -> None:
    """Write `tasks/some.parquet`."""
    (folder / "tasks").mkdir(exist_ok=True)
    columns = {"task_id": list(texts), "family": [family] * len(texts), "text": list(texts.values())}
    pq.write_table(pa.table(columns), folder / "tasks" / "some.parquet")


def invented(folder: Path, n_per_family: int = 30, n_trials: int = 2, seed: int = 0) -> Path:
    """Two families, two domains each, two models, several trials."""
    rng = np.random.default_rng(seed)
    rows = []
    for family, success in SUCCESS.items():
        for i in range(n_per_family):
            for model, rate in success.items():
                for trial in range(n_trials):
                    solved = float(rng.random() < rate)
                    cost_usd = PRICE[model] * (0.5 + rng.random())
                    named = {"family": family, "domain": f"d{i % 2}", "model": model, "trial": trial}
                    rows.append(row(f"{family}-{i:03}", **named, success=solved, cost_usd=cost_usd))
    return write(folder, rows)
