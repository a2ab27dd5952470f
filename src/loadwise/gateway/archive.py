"""Programs that have left the router's memory, whether they are kept on disk or not."""

from typing import Protocol

from loadwise.kernel.commands import ProgramRecord


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
