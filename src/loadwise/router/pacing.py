"""When a new program may start with respect to verdicts still out: the four feedback arms.

- `delayed`: at once; verdicts land whenever they come (ORACLE).
- `sequential`: one program at a time, its verdict before the next starts.
- `batch_sync`: `size` programs start, then all their verdicts before the next batch.
- `per_slot`: `size` slots with a learner each; a slot takes its next program after its verdict.

A program is *resolved* when its verdict landed, or when none will come (censored, rejected, failed).
Reference: ORACLE, section 3.2 and appendix E.9.
"""

from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import ProgramId

from .config import FeedbackConfig


class PacingState(Fact, frozen=True, kw_only=True):
    """A dump of `Pacing`."""

    slot_by_program: dict[str, int]
    waiting: list[str]
    n_started_in_batch: int


class Pacing:
    """Admits programs to routing; those that must wait stay in order of arrival."""

    def __init__(self, config: FeedbackConfig) -> None:
        self.arm = config.arm
        self.size = 1 if config.arm == "sequential" else config.size
        self.slot_by_program: dict[ProgramId, int] = {}
        self.waiting: dict[ProgramId, None] = {}
        self.n_started_in_batch = 0

    def enter(self, program_id: ProgramId) -> int | None:
        """The slot of a program that may start now, or None: then it waits."""
        if self.arm == "delayed":
            return 0
        if self.waiting or not self._has_room():
            self.waiting[program_id] = None
            return None
        return self._start(program_id)

    def leave(self, program_id: ProgramId) -> None:
        """The program is resolved, or gave up waiting."""
        self.waiting.pop(program_id, None)
        self.slot_by_program.pop(program_id, None)
        if not self.slot_by_program and self.n_started_in_batch >= self.size:
            self.n_started_in_batch = 0

    def next(self) -> tuple[ProgramId, int] | None:
        """Take the first waiting program that may start now, and its slot."""
        if not self.next_may_start:
            return None
        program_id = next(iter(self.waiting))
        del self.waiting[program_id]
        return program_id, self._start(program_id)

    @property
    def next_may_start(self) -> bool:
        """Whether somebody waits who need not."""
        return bool(self.waiting) and self._has_room()

    def _has_room(self) -> bool:
        if self.arm == "delayed":
            return True
        if self.arm == "batch_sync":
            return self.n_started_in_batch < self.size
        return len(self.slot_by_program) < self.size

    def _start(self, program_id: ProgramId) -> int:
        if self.arm == "delayed":
            return 0
        slot = 0
        if self.arm == "per_slot":
            taken = set(self.slot_by_program.values())
            slot = next(i for i in range(self.size) if i not in taken)
        self.n_started_in_batch += 1
        self.slot_by_program[program_id] = slot
        return slot

    def dump(self) -> PacingState:
        """State as plain values."""
        return PacingState(
            slot_by_program={str(p): slot for p, slot in self.slot_by_program.items()},
            waiting=list(self.waiting),
            n_started_in_batch=self.n_started_in_batch,
        )

    def load(self, state: PacingState) -> None:
        """Continue from a dump; one of another arm or size keeps its order, and slots as far as they still exist."""
        is_kept = self.arm != "delayed"
        self.slot_by_program = {ProgramId(p): s for p, s in state.slot_by_program.items() if is_kept and s < self.size}
        self.waiting = {ProgramId(p): None for p in state.waiting}
        self.n_started_in_batch = state.n_started_in_batch
