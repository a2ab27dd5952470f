"""Committed lists of task ids: which tasks a result is about, and which half of them chose what.

A folder of lists holds `index.json` and one file per list or split, plain text or gzipped (`.gz`), a task a line:

    family<TAB>task_id            a list
    bits<TAB>family<TAB>task_id   a split: character k is 1 where the task is in the second half of halving k

The hash of a file is SHA-256 over its lines joined by newlines, without one at the end; for a list it is the
`task_ids_sha256` that a replay of these tasks reports. Lists joined by `+` are a stream, in that order. Ids are facts;
no file holds a task's text (where tasks have no id of their own, the first 16 digits of their text's SHA-256 stand).
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

INDEX = "index.json"
_BYTES_MAX = 64 * 1024 * 1024

Task = tuple[str, str]
"""Family and id."""


class Listed(Fact, frozen=True, kw_only=True):
    """What the index says of a file."""

    file: str
    n: int
    """Lines."""
    sha256: str
    about: str
    """What the tasks are, in words."""


class Index(Fact, frozen=True, kw_only=True):
    """Every list and split by name, and the hash of every stream that is used."""

    lists: dict[str, Listed]
    splits: dict[str, Listed]
    streams: dict[str, str]


class Split(NamedTuple):
    """Halvings of the same tasks."""

    tasks: tuple[Task, ...]
    is_second: npt.NDArray[np.bool_]
    """Shape (n_tasks, n_halvings)."""

    def halves(self, place: int) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """First and second half of one halving: settings are chosen on one and scored on the other, both ways."""
        rows = list(zip(self.tasks, self.is_second[:, place].tolist(), strict=True))
        return tuple(task for task, second in rows if not second), tuple(task for task, second in rows if second)


def digest(lines: Iterable[str]) -> str:
    """SHA-256 of lines joined by newlines.

    >>> digest(["swe\\ta", "swe\\tb"])[:16]
    'c128772f78d93e1a'
    """
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def task_digest(tasks: Iterable[Task]) -> str:
    """The hash of tasks in their order, as every replay reports it."""
    return digest(f"{family}\t{task_id}" for family, task_id in tasks)


def parse_tasks(text: str, where: str) -> tuple[Task, ...]:
    """The tasks of a list.

    >>> parse_tasks("swe\\ta\\nswe\\tb\\n", "here")
    (('swe', 'a'), ('swe', 'b'))

    Raises:
        ConfigError: it is empty, a line is not `family<TAB>task_id`, or a task is in it twice.
    """
    tasks = tuple(_fields(line, 2, where, number) for number, line in _numbered(text, where))
    found = tuple((family, task_id) for family, task_id in tasks)
    _require_distinct(found, where)
    return found


def parse_split(text: str, where: str) -> Split:
    """The tasks of a split, and their halves.

    >>> parse_split("01\\tswe\\ta\\n10\\tswe\\tb\\n", "here").halves(1)
    ((('swe', 'b'),), (('swe', 'a'),))

    Raises:
        ConfigError: it is empty, a line is not `bits<TAB>family<TAB>task_id`, lines have other numbers of bits, or a
            task is in it twice.
    """
    rows = [_fields(line, 3, where, number) for number, line in _numbered(text, where)]
    for number, (bits, _, _) in enumerate(rows, 1):
        if not bits or set(bits) - {"0", "1"} or len(bits) != len(rows[0][0]):
            raise ConfigError(f"{where}, line {number}: bits {bits!r} are not {len(rows[0][0])} of 0 and 1")
    tasks = tuple((family, task_id) for _, family, task_id in rows)
    _require_distinct(tasks, where)
    return Split(tasks, np.array([[bit == "1" for bit in bits] for bits, _, _ in rows]))


def _numbered(text: str, where: str) -> Iterable[tuple[int, str]]:
    lines = text.removesuffix("\n").split("\n")
    if lines == [""]:
        raise ConfigError(f"{where} is empty; it must list at least 1 task")
    return enumerate(lines, 1)


def _fields(line: str, n: int, where: str, number: int) -> tuple[str, ...]:
    fields = tuple(line.split("\t"))
    if len(fields) != n or "" in fields:
        raise ConfigError(f"{where}, line {number}: {line[:80]!r} is not {n} fields with tabs between")
    return fields


def _require_distinct(tasks: Sequence[Task], where: str) -> None:
    seen: set[Task] = set()
    for task in tasks:
        if task in seen:
            raise ConfigError(f"{where}: task {task[1]!r} of {task[0]!r} is listed twice; once is the limit")
        seen.add(task)


def require_listed(tasks: Sequence[Task], found: Sequence[Task], where: str) -> None:
    """Refuse tasks that are not those of a list, naming the first that differs.

    Raises:
        ConfigError: a task is missing, one is there that is not listed, or the order differs.
    """
    listed, present = set(tasks), set(found)
    for task in tasks:
        if task not in present:
            raise ConfigError(f"{where} lists task {task[1]!r} of {task[0]!r}, which has no outcome of every model")
    for task in found:
        if task not in listed:
            raise ConfigError(f"task {task[1]!r} of {task[0]!r} is not listed in {where}, which has {len(tasks)}")
    if tuple(tasks) != tuple(found):
        raise ConfigError(f"{where}: the tasks are those of the outcomes in another order")


class TaskLists:
    """The lists of a folder; each file is held to its hash when it is read.

    Raises:
        ConfigError: there is no index, or it does not fit its format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / INDEX
        try:
            self.index = msgspec.json.decode(path.read_bytes(), type=Index)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{str(path)!r}: {error}") from error

    def tasks(self, name: str) -> tuple[Task, ...]:
        """The tasks of a list, or of lists joined by `+`.

        Raises:
            ConfigError: no such list, or its file does not fit its hash.
        """
        found: list[Task] = []
        for part in name.split("+"):
            found += parse_tasks(self._text(part, self.index.lists, "list"), f"list {part!r}")
        _require_distinct(found, f"stream {name!r}")
        return tuple(found)

    def split(self, name: str) -> Split:
        """A split.

        Raises:
            ConfigError: no such split, or its file does not fit its hash.
        """
        return parse_split(self._text(name, self.index.splits, "split"), f"split {name!r}")

    def sha256(self, name: str) -> str:
        """The hash of a stream, as a replay of it reports.

        Raises:
            ConfigError: as `tasks`, or the index gives the stream another hash.
        """
        found = task_digest(self.tasks(name))
        if self.index.streams.get(name, found) != found:
            raise ConfigError(f"stream {name!r} has SHA-256 {found}; the index says {self.index.streams[name]}")
        return found

    def _text(self, name: str, among: Mapping[str, Listed], kind: str) -> str:
        listed = among.get(name)
        if listed is None:
            raise ConfigError(f"{kind} {name!r} is unknown; known: {', '.join(sorted(among))}")
        text = read_lines(self._folder / listed.file)
        lines = text.removesuffix("\n").split("\n")
        sha256 = digest(lines)
        if sha256 != listed.sha256 or len(lines) != listed.n:
            raise ConfigError(
                f"{kind} {name!r} has {len(lines)} lines of SHA-256 {sha256};"
                f" the index says {listed.n} of {listed.sha256}"
            )
        return text


def read_lines(path: Path) -> str:
    """The text of a list's file, unpacked where its name ends in `.gz`.

    Raises:
        ConfigError: it cannot be read, is no UTF-8, or unpacks to more than 64 MiB.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(_BYTES_MAX + 1)
        else:
            with path.open("rb") as plain:
                data = plain.read(_BYTES_MAX + 1)
        if len(data) > _BYTES_MAX:
            raise ConfigError(f"{str(path)!r} holds more than {_BYTES_MAX} bytes, the limit of a list")
        return data.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
