"""How commands speak: `put` results on stdout, `say` everything else on stderr."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that every command has."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def put(text: str) -> None:
    """One result, on its own line, at once."""
    print(text, flush=True)


def put_json(value: Any) -> None:
    """A result as one line of JSON. Facts are written whole, defaults included."""
    put(msgspec.json.encode(plain(value)).decode())


def say(text: str) -> None:
    """Talk."""
    print(text, file=sys.stderr, flush=True)


def plain(value: Any) -> Any:
    """Facts as plain mappings with every field, so that a reader need not know our defaults."""
    if isinstance(value, msgspec.Struct):
        return {field: plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def columns(rows: Sequence[Sequence[str]], *, gap: str = "  ") -> str:
    """Rows as aligned text; the last column is left as it is.

    >>> print(columns([("a", "first"), ("long", "second")]))
    a     first
    long  second
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1:] = [0]
    return "\n".join(
        gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
