"""The program table: open programs, ended ones that wait for a verdict, closed ones that are still remembered.

Every part has a bound (law L15), and each is a dict whose order is the order in which its members would be dropped:
idle longest, ended longest, closed longest.
"""

from loadwise.kernel.ids import ProgramId

from .program import Program


class ProgramTable:
    """Programs by id, and the three orders of leaving."""

    def __init__(self) -> None:
        self.by_id: dict[ProgramId, Program] = {}
        self.idle: dict[ProgramId, None] = {}
        """Open programs without an open turn, idle longest first."""
        self.verifying: dict[ProgramId, None] = {}
        """Ended programs without a verdict, ended longest first."""
        self.closed: dict[ProgramId, float] = {}
        """Closed programs and when they were closed, closed longest first."""

    @property
    def n_open(self) -> int:
        """Programs that still take turns."""
        return len(self.by_id) - len(self.verifying) - len(self.closed)

    def add(self, program: Program) -> None:
        """A new program, with a turn open."""
        self.by_id[program.program_id] = program

    def rest(self, program_id: ProgramId) -> None:
        """Its last open turn ended."""
        self.idle.pop(program_id, None)
        self.idle[program_id] = None

    def wake(self, program_id: ProgramId) -> None:
        """A turn arrived."""
        self.idle.pop(program_id, None)

    def end(self, program_id: ProgramId) -> None:
        """It takes no more turns and waits for a verdict."""
        self.idle.pop(program_id, None)
        self.verifying[program_id] = None

    def reopen(self, program_id: ProgramId) -> None:
        """It was judged, and takes turns again."""
        self.verifying.pop(program_id, None)
        self.idle[program_id] = None

    def close(self, program_id: ProgramId, at_s: float) -> None:
        """Nothing more is expected of it."""
        self.idle.pop(program_id, None)
        self.verifying.pop(program_id, None)
        self.closed[program_id] = at_s

    def forget(self, program_id: ProgramId) -> None:
        """Drop every trace."""
        self.idle.pop(program_id, None)
        self.verifying.pop(program_id, None)
        self.closed.pop(program_id, None)
        del self.by_id[program_id]
