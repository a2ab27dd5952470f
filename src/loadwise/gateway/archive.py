"""Programs that have left the router's memory, whether they are kept on disk or not."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from loadwise.kernel.commands import ProgramRecord
from loadwise.kernel.errors import JournalError, Overloaded

_T = TypeVar("_T")


class Archived(Protocol):
    """Finds archived programs by id."""

    def get(self, program_id: str) -> ProgramRecord | None:
        """The record, or None where the program is unknown."""
        ...

    def recent(self, limit: int = 100) -> list[ProgramRecord]:
        """The latest archived programs, the latest first."""
        ...


class NoArchive:
    """Without a journal nothing outlives the router's memory."""

    def get(self, program_id: str) -> ProgramRecord | None:
        """Never anything."""
        return None

    def recent(self, limit: int = 100) -> list[ProgramRecord]:
        """Never anything."""
        return []


class WatchedArchive:
    """Tells where the archive cannot be read, and lets callers come again instead of failing.

    Args:
        say: hears of trouble once, until it is over.
    """

    def __init__(self, archive: Archived, say: Callable[[str], None]) -> None:
        self._archive = archive
        self._say = say
        self._is_broken = False
        self.n_failures = 0

    def get(self, program_id: str) -> ProgramRecord | None:
        """The record, or None where the program is unknown.

        Raises:
            Overloaded: the archive cannot be read now (code `index_failed`).
        """
        return self._read(lambda: self._archive.get(program_id))

    def recent(self, limit: int = 100) -> list[ProgramRecord]:
        """The latest archived programs, the latest first.

        Raises:
            Overloaded: the archive cannot be read now (code `index_failed`).
        """
        return self._read(lambda: self._archive.recent(limit))

    def _read(self, read: Callable[[], _T]) -> _T:
        try:
            found = read()
        except (JournalError, msgspec.MsgspecError) as error:
            self.n_failures += 1
            text = f"archived programs cannot be read: {error}"
            if not self._is_broken:
                self._is_broken = True
                self._say(f"{text}; programs that are not in memory count as unknown")
            raise Overloaded(text, retry_after_s=30.0, code="index_failed") from error
        if self._is_broken:
            self._is_broken = False
            self._say("archived programs can be read again")
        return found
