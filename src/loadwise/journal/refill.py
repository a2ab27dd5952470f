"""Fills an index that was lost, in the background: nobody waits for programs that were archived long ago.

Theory of operation. A snapshot lets the host start at once, but archives from before it are in the journal only as
commands that must be regenerated. A thread does that with a machine of its own, in slices so short that the host's
loop, which shares the interpreter with it, hardly notices. Until it is done those programs count as unknown.
"""

import threading
from pathlib import Path

from loadwise.kernel.commands import Archive

from .index import Index
from .regenerate import MakeMachine, from_begin

SLICE_ENTRIES = 16
PAUSE_S = 0.005


class Refill:
    """One pass over the journal's past.

    Args:
        last_sequence: archives up to this entry are missing.
    """

    def __init__(self, path: Path, index: Index, last_sequence: int, make_machine: MakeMachine) -> None:
        self._path = path
        self._index = index
        self._last_sequence = last_sequence
        self._make_machine = make_machine
        self._thread = threading.Thread(target=self._run, name="journal-refill", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def wait(self) -> None:
        """Return when it is done, or given up."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._fill()
        except Exception as error:  # whatever it is, the journal is whole and the host goes on
            self._index.tell(f"the index could not be filled again: {error}")

    def _fill(self) -> None:
        steps = from_begin(self._path, self._make_machine).steps(follows=True)
        for n_entries, (entry, commands) in enumerate(steps, 1):
            for command in commands:
                if type(command) is Archive:
                    self._index.add(entry.sequence, command.program)
            if entry.sequence >= self._last_sequence:
                break
            if n_entries % SLICE_ENTRIES == 0 and self._index.closes_within(PAUSE_S):
                return
        self._index.flush()
        self._index.tell(f"the index is filled again up to sequence {self._last_sequence}")
