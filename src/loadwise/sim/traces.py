"""Recorded programs: a table with one row per call, as Parquet or as lines of JSON.

Columns: `arrival_s` (from the trace's begin, or from the session's), `input_tokens`, `output_tokens`; and where there
are programs of several calls `session`, with `service_s` (how long a call took) so that gaps are known; `hash_ids`
names prompt blocks of 512 tokens, each for all that precedes it (Mooncake). A table without sessions is a table of
programs of one call. Nothing is repaired: a hole, a number out of range or an arrival out of order is an error that
names file, row, column and value.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from loadwise.kernel.errors import ConfigError

from .bounds import SECONDS_MAX, TOKENS_MAX
from .engine import PREFIX_ID_TOKENS

_NEEDED = ("arrival_s", "input_tokens", "output_tokens")


class Recorded(NamedTuple):
    """One program: its arrival, and (growth, output, gap, repeated prefix, block names) of its turns."""

    arrives_at_s: float
    turns: tuple[tuple[int, int, float, int | None, tuple[int, ...]], ...]


def read_trace(path: str, most_tokens: float = math.inf, output_ratio: float = 1.0) -> tuple[Recorded, ...]:
    """The programs of a trace, by arrival.

    Args:
        most_tokens: Prompt and answer that the largest engine takes.
        output_ratio: Of what was recorded, the least that an answer may be here (0: a single token).

    Raises:
        ConfigError: the file cannot be read, or a row is wrong.
    """
    rows = list(_rows(path))
    if not rows:
        raise ConfigError(f"trace {path!r} has no rows")
    for i, row in enumerate(rows):
        _check(path, i, row)
        if row["input_tokens"] + max(int(row["output_tokens"] * output_ratio), 1) > most_tokens:
            raise ConfigError(
                f"trace {path!r}, row {i}: input_tokens is {row['input_tokens']!r} and output_tokens "
                f"{row['output_tokens']!r}; the request can never fit, the largest engine takes {most_tokens:.0f}"
            )
    if all(row.get("session") is None for row in rows):
        return _single_calls(path, rows)
    return _sessions(path, rows)


def _rows(path: str) -> Iterable[dict[str, Any]]:
    try:
        if path.endswith(".parquet"):
            return _parquet_rows(path)
        lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise ConfigError(f"trace {path!r} cannot be read: {error}") from error
    return [_json_row(path, i, line) for i, line in enumerate(lines)]


def _json_row(path: str, i: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)  # takes NaN, as Python writes it, so that `_check` can name its column
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"trace {path!r}, row {i} cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"trace {path!r}, row {i} is {row!r:.40}; it must be an object")
    return row


def _parquet_rows(path: str) -> list[dict[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"trace {path!r} is Parquet, which needs the extra `lab` (pyarrow)") from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"trace {path!r} cannot be read: {error}") from error
    return rows


def _check(path: str, i: int, row: dict[str, Any]) -> None:
    for name in _NEEDED:
        value = row.get(name)
        if value is None:
            raise ConfigError(f"trace {path!r}, row {i}: {name} is missing")
        least = 0 if name == "arrival_s" else 1
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        most = SECONDS_MAX if name == "arrival_s" else TOKENS_MAX
        if not is_number or not (math.isfinite(value) and least <= value <= most):
            raise ConfigError(
                f"trace {path!r}, row {i}: {name} is {value!r}; it must be a finite number in [{least}, {most:.0f}]"
            )
        if least and value != int(value):
            raise ConfigError(f"trace {path!r}, row {i}: {name} is {value!r}; it must be a whole number")
    service = row.get("service_s")
    is_number = isinstance(service, int | float) and not isinstance(service, bool)
    if service is not None and not (is_number and math.isfinite(service) and 0 <= service <= SECONDS_MAX):
        raise ConfigError(
            f"trace {path!r}, row {i}: service_s is {service!r}; it must be a finite number in [0, {SECONDS_MAX:.0f}]"
        )
    session = row.get("session")
    if session is not None and not isinstance(session, str | int):
        raise ConfigError(f"trace {path!r}, row {i}: session is {session!r}; it must be a name or a number")
    ids = row.get("hash_ids")
    if ids is not None and not isinstance(ids, list):
        raise ConfigError(f"trace {path!r}, row {i}: hash_ids is {ids!r}; it must be a list of whole numbers")
    n_blocks = -(-int(row["input_tokens"]) // PREFIX_ID_TOKENS)
    if ids is not None and len(ids) > n_blocks:
        raise ConfigError(
            f"trace {path!r}, row {i}: hash_ids has {len(ids)} names; "
            f"input_tokens is {row['input_tokens']!r}, which are {n_blocks} blocks of {PREFIX_ID_TOKENS}"
        )
    for value in ids or ():
        if not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 30):
            raise ConfigError(f"trace {path!r}, row {i}: hash_ids has {value!r}; names are whole numbers in 0..2^30")


def _single_calls(path: str, rows: list[dict[str, Any]]) -> tuple[Recorded, ...]:
    programs: list[Recorded] = []
    for i, row in enumerate(rows):
        at_s = float(row["arrival_s"])
        if programs and at_s < programs[-1].arrives_at_s:
            before_s = programs[-1].arrives_at_s
            raise ConfigError(f"trace {path!r}, row {i}: arrival_s is {at_s!r}, before the last row's {before_s!r}")
        ids = tuple(row.get("hash_ids") or ())
        programs.append(Recorded(at_s, ((int(row["input_tokens"]), int(row["output_tokens"]), 0.0, None, ids),)))
    return tuple(programs)


def _sessions(path: str, rows: list[dict[str, Any]]) -> tuple[Recorded, ...]:
    calls: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for i, row in enumerate(rows):
        if row.get("session") is None:
            raise ConfigError(f"trace {path!r}, row {i}: session is missing, while other rows have one")
        calls.setdefault(str(row["session"]), []).append((i, row))
    programs = [_session(path, session) for session in calls.values()]
    # Sessions that all begin at their own 0 arrive together; those of one clock, when they began.
    return tuple(sorted(programs, key=lambda program: program.arrives_at_s))


def _session(path: str, rows: list[tuple[int, dict[str, Any]]]) -> Recorded:
    turns: list[tuple[int, int, float, int | None, tuple[int, ...]]] = []
    free_at_s = context = prompt = 0.0
    for i, row in rows:
        at_s, n_input, n_output = float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"])
        last_at_s = float(rows[len(turns) - 1][1]["arrival_s"]) if turns else 0.0
        if turns and at_s < last_at_s:
            raise ConfigError(
                f"trace {path!r}, row {i}: arrival_s is {at_s!r}, before the {last_at_s!r} of its session's last call"
            )
        # A context that did not grow by its answer was edited: reasoning was dropped, or it was compacted.
        kept = None if n_input >= context else int(min(prompt, n_input))
        gap_s = max(at_s - free_at_s, 0.0) if turns else 0.0
        turns.append((int(n_input - context), n_output, gap_s, kept, tuple(row.get("hash_ids") or ())))
        prompt, context = n_input, n_input + n_output
        free_at_s = at_s + float(row.get("service_s") or 0.0)
    return Recorded(float(rows[0][1]["arrival_s"]), tuple(turns))
