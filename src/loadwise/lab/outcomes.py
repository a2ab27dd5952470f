"""Reads a folder of measured outcomes (docs/formats/outcomes.md) and refuses what does not fit it, in one line.

One row is one model's run of one task by one agent. Only the rows of the families asked for are kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError

TEXT_COLUMNS = ("task_id", "family", "domain", "model", "agent")
COLUMNS = (*TEXT_COLUMNS, "trial", "success", "cost_usd")
"""What every outcomes file must have; other columns are not read."""
KEYS = ("task_id", "family", "model", "agent", "trial")
"""What names a run: never null."""
COST_MAX_USD = 1e9

_ROWS_MAX = 20_000_000


class Outcomes(NamedTuple):
    """The rows of some families, as columns of equal length."""

    task_id: list[str]
    family: list[str]
    domain: list[str | None]
    model: list[str]
    agent: list[str]
    trial: npt.NDArray[np.int64]
    success: npt.NDArray[np.float64]
    cost_usd: npt.NDArray[np.float64]
    """NaN where the cost is unknown; a file that holds a NaN of its own is refused."""


def read_outcomes(folder: Path, families: Sequence[str], models: Sequence[str]) -> Outcomes:
    """The rows of `families` under `folder/outcomes/*.parquet`, of all models; those of `models` are checked.

    Raises:
        ConfigError: no such folder or file, a column that is missing or of another type, a family or a model without
            a row (the known ones are listed), a value out of range, or two rows for one run.
    """
    tables = [_read(path, families) for path in _files(folder)]
    table = _pyarrow().concat_tables(tables)
    if table.num_rows > _ROWS_MAX:
        raise ConfigError(f"{str(folder)!r} has {table.num_rows} rows of the stream; the limit is {_ROWS_MAX}")
    _require_families(folder, table, families)
    columns = {name: table.column(name).to_pylist() for name in TEXT_COLUMNS}
    known = set(columns["model"])
    for model in models:
        if model not in known:
            raise ConfigError(
                f"model {model!r} has no outcome in {', '.join(families)}; known: {', '.join(sorted(known))}"
            )
    outcomes = Outcomes(
        **columns,
        trial=_numbers(table, "trial").astype(np.int64),
        success=_numbers(table, "success"),
        cost_usd=_numbers(table, "cost_usd"),
    )
    nulls = table.column("cost_usd").is_null().to_numpy(zero_copy_only=False)
    _check(outcomes, nulls, frozenset(models))
    return outcomes


def read_texts(folder: Path, families: Sequence[str]) -> dict[tuple[str, str], str]:
    """Texts by (family, task_id) from `folder/tasks/*.parquet`; empty where there is no such folder.

    A file without a column `text` has no texts; one without `family` speaks of every family.

    Raises:
        ConfigError: a file cannot be read, lacks `task_id`, or has a column of another type.
    """
    texts: dict[tuple[str, str], str] = {}
    for path in sorted((folder / "tasks").glob("*.parquet")):
        columns = [name for name in ("task_id", "family", "text") if name == "task_id" or name in _names(path)]
        table = _open(path, columns, columns, families)
        if "text" not in columns:
            continue
        rows = zip(table.column("task_id").to_pylist(), table.column("text").to_pylist(), strict=True)
        named = table.column("family").to_pylist() if "family" in columns else [None] * table.num_rows
        for (task_id, text), family in zip(rows, named, strict=True):
            if text:
                texts.update({(one, task_id): text for one in ([family] if family is not None else families)})
    return texts


def read_task_texts(folder: Path) -> list[tuple[str, str]]:
    """Every (family, text) of `folder/*.parquet`, or of `folder/tasks/*.parquet`; rows without a text are left out.

    Raises:
        ConfigError: no such folder or file, or a column that is missing or of another type.
    """
    if not folder.is_dir():
        raise ConfigError(f"tasks folder {str(folder)!r} does not exist")
    places = (folder / "tasks", folder)
    paths = next((found for place in places if (found := sorted(place.glob("*.parquet")))), [])
    if not paths:
        raise ConfigError(f"{str(folder)!r} has no *.parquet and no tasks/*.parquet")
    rows: list[tuple[str, str]] = []
    for path in paths:
        pa = _pyarrow()
        try:
            schema = pa.parquet.read_schema(path)
            for name in ("family", "text"):
                _require_type(path, schema, name, is_text=True)
            table = pa.parquet.read_table(path, columns=["family", "text"], partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
        pairs = zip(table.column("family").to_pylist(), table.column("text").to_pylist(), strict=True)
        rows += [(family, text) for family, text in pairs if family and text and text.strip()]
    return rows


def _names(path: Path) -> list[str]:
    """The columns of a file; none where it cannot be read, which opening it says better."""
    pa = _pyarrow()
    try:
        names: list[str] = pa.parquet.read_schema(path).names
    except (pa.ArrowException, OSError):
        return []
    return names


def _pyarrow() -> Any:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.compute  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("outcomes need pyarrow, which is not installed: pip install 'loadwise[lab]'") from error
    return pyarrow


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"outcomes folder {str(folder)!r} does not exist")
    paths = sorted(path for path in (folder / "outcomes").glob("*.parquet") if path.is_file())
    if not paths:
        raise ConfigError(f"{str(folder)!r} has no outcomes/*.parquet")
    return paths


def _read(path: Path, families: Sequence[str]) -> Any:
    return _open(path, COLUMNS, TEXT_COLUMNS, families)


def _open(path: Path, columns: Sequence[str], texts: Sequence[str], families: Sequence[str]) -> Any:
    """The rows of `families`, with every column of one type."""
    pa = _pyarrow()
    try:
        schema = pa.parquet.read_schema(path)
        for name in columns:
            _require_type(path, schema, name, is_text=name in texts)
        # Dictionary columns compare with strings only after the cast, so rows are chosen last.
        table = pa.parquet.read_table(path, columns=list(columns), partitioning=None)
        arrays = [
            table.column(name).cast(pa.large_string() if name in texts else pa.float64(), safe=False)
            for name in columns
        ]
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
    for name, array in zip(columns, arrays, strict=True):
        if name in KEYS and array.null_count:
            raise ConfigError(f"{str(path)!r}: column {name!r} has {array.null_count} nulls; it may have none")
    table = pa.table(dict(zip(columns, arrays, strict=True)))
    if "family" not in columns:
        return table
    wanted = pa.compute.is_in(table.column("family"), value_set=pa.array(families, pa.large_string()))
    return table.filter(wanted)


def _require_type(path: Path, schema: Any, name: str, *, is_text: bool) -> None:
    if name not in schema.names:
        raise ConfigError(f"{str(path)!r} lacks column {name!r}; it has {', '.join(schema.names) or 'none'}")
    kind = schema.field(name).type
    types = _pyarrow().types
    value = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_null(value):
        fits = name in ("domain", "cost_usd", "text")  # a column of nulls has no other type
    elif is_text:
        fits = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    elif name == "trial":
        fits = types.is_integer(value)
    else:
        numeric = (types.is_floating, types.is_integer, types.is_decimal, types.is_boolean)
        fits = any(is_of(value) for is_of in numeric)
    if not fits:
        wanted = "a string" if is_text else "an integer" if name == "trial" else "a number"
        raise ConfigError(f"{str(path)!r}: column {name!r} is of type {kind}; it must be {wanted}")


def _require_families(folder: Path, table: Any, families: Sequence[str]) -> None:
    found = set(table.column("family").to_pylist())
    for family in families:
        if family not in found:
            known: set[str] = set()
            for path in _files(folder):
                column = _pyarrow().parquet.read_table(path, columns=["family"], partitioning=None).column("family")
                known.update(name for name in column.to_pylist() if name is not None)
            raise ConfigError(f"family {family!r} has no outcome; known: {', '.join(sorted(known)) or 'none'}")


def _numbers(table: Any, name: str) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = table.column(name).to_numpy().astype(np.float64)
    return values


def _check(outcomes: Outcomes, has_no_cost: npt.NDArray[np.bool_], models: frozenset[str]) -> None:
    """Every value of the models asked for is in its range, and no run is there twice."""
    keys = zip(outcomes.task_id, outcomes.family, outcomes.model, outcomes.agent, outcomes.trial.tolist(), strict=True)
    values = zip(outcomes.success.tolist(), outcomes.cost_usd.tolist(), has_no_cost.tolist(), strict=True)
    seen: set[tuple[str, str, str, str, int]] = set()
    for key, (success, cost_usd, lacks_cost) in zip(keys, values, strict=True):
        task_id, family, model, agent, trial = key
        if model not in models:
            continue
        run = f"task {task_id!r} of {family!r}, model {model!r}, agent {agent!r}, trial {trial}"
        if trial < 0:
            raise ConfigError(f"{run}: trial must be >= 0")
        if not 0.0 <= success <= 1.0:
            raise ConfigError(f"{run}: success is {success!r}; it must be in [0, 1]")
        if not lacks_cost and not 0.0 <= cost_usd <= COST_MAX_USD:
            raise ConfigError(
                f"{run}: cost_usd is {cost_usd!r}; it must be in [0, {COST_MAX_USD:g}], or null where unknown"
            )
        if key in seen:
            raise ConfigError(f"{run}: there are two such rows")
        seen.add(key)
