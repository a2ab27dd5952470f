"""Results of cells on disk, so that a run that was interrupted goes on where it was.

One file of JSON lines for one state of the package: what a cell comes to follows from its description and from the
package's files, and from nothing else. A line that was cut off when a run died is passed over.
"""

import hashlib
import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from loadwise.kernel.errors import ConfigError

from .disc import Cell, CellResult
from .disc_world import is_path, world_text

_KINDS = (".py", ".yaml", ".json")


def package_digest() -> str:
    """Sixteen hexadecimal digits that change with any source or data file of the package."""
    digest = hashlib.sha256()
    for name, content in sorted(_files(resources.files("loadwise"), "")):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _files(folder: Traversable, name: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            found += _files(entry, path) if entry.name != "__pycache__" else []
        elif entry.name.endswith(_KINDS):
            found.append((path, entry.read_bytes()))
    return found


def cell_key(cell: Cell) -> str:
    """The cell's description as text, equal for equal cells; of a world from a file also what stands in it."""
    described: list[Any] = [cell]
    if is_path(cell.world):
        described.append(hashlib.sha256(world_text(cell.world).encode()).hexdigest())
    return msgspec.json.encode(described, order="sorted").decode()


class CellCache:
    """Cells and their results, appended as they come.

    Args:
        folder: Where files lie, one for each state of the package; made if absent.
        digest: Of the package's state, if it is known already.

    Raises:
        ConfigError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, digest: str | None = None) -> None:
        self.path = folder / f"{digest or package_digest()}.jsonl"
        self._result_by_key: dict[str, CellResult] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        except OSError as error:
            raise ConfigError(f"cells cannot be kept in {str(folder)!r}: {error}") from error
        for line in lines:
            try:
                key, result = msgspec.json.decode(line, type=tuple[str, CellResult])
            except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError):
                continue
            self._result_by_key[key] = result

    def __len__(self) -> int:
        return len(self._result_by_key)

    def get(self, cell: Cell) -> CellResult | None:
        """What is known of a cell."""
        return self._result_by_key.get(cell_key(cell))

    def put(self, cell: Cell, result: CellResult) -> None:
        """Keep a result; it is on its way to the disk when this returns."""
        key = cell_key(cell)
        if key in self._result_by_key:
            return
        self._result_by_key[key] = result
        # A leading newline ends what a run that died left of a line; one write, so that two runs do not mix theirs.
        line = b"\n" + msgspec.json.encode((key, result)) + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
