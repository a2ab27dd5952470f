"""What is due when, so that nothing waits without a bound and the host needs one timer only.

A heap with lazy deletion: rescheduling or cancelling leaves a dead entry behind, and the heap is rebuilt when more than
half of it is dead, so its size is bounded by what is really pending.
"""

import heapq
import math

from loadwise.kernel.errors import LawBroken


class Agenda:
    """Keys with due times.

    >>> agenda = Agenda()
    >>> agenda.schedule("idle:p1", 5.0)
    >>> agenda.schedule("hold:7", 3.0)
    >>> agenda.pop_due(4.0), agenda.next_at_s
    (['hold:7'], 5.0)
    """

    def __init__(self) -> None:
        self._entry_by_key: dict[str, tuple[float, int, str]] = {}
        """Each key's live entry in the heap: the very one, so that a dead one is told by identity."""
        self._heap: list[tuple[float, int, str]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entry_by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._entry_by_key

    def schedule(self, key: str, due_at_s: float) -> None:
        """Make `key` due at `due_at_s`, instead of whenever it was due before.

        Raises:
            LawBroken: L15, that instant never comes.
        """
        if not due_at_s < math.inf:  # a NaN at the heap's top would block all others
            raise LawBroken("L15", f"{key!r} would be due at {due_at_s!r} s")
        self._serial += 1
        entry = self._entry_by_key[key] = (due_at_s, self._serial, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry_by_key) + 64:
            self._heap = list(self._entry_by_key.values())
            heapq.heapify(self._heap)

    def cancel(self, key: str) -> None:
        """Forget `key`; unknown keys are fine."""
        self._entry_by_key.pop(key, None)

    @property
    def next_at_s(self) -> float | None:
        """When something is due next, or None."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._entry_by_key.get(entry[2]) is entry:
                return entry[0]
            heapq.heappop(heap)
        return None

    def pop_due(self, now_s: float) -> list[str]:
        """Take everything due at `now_s` or before, in order of due time, then of scheduling."""
        due: list[str] = []
        while (next_at_s := self.next_at_s) is not None and next_at_s <= now_s:
            _, _, key = heapq.heappop(self._heap)
            del self._entry_by_key[key]
            due.append(key)
        return due

    def dump(self) -> list[tuple[str, float]]:
        """Pending keys and due times in the order in which they would fire."""
        return [(key, due_at_s) for due_at_s, _, key in sorted(self._entry_by_key.values())]

    def load(self, pending: list[tuple[str, float]]) -> None:
        """Replace the content by a dumped one."""
        self._entry_by_key.clear()
        self._heap.clear()
        for key, due_at_s in pending:
            self.schedule(key, due_at_s)
