"""ThunderAgent's ticks: every few seconds programs are resumed where there is room and paused where there is none.

A program that is paused has no place: its next turn is held until a tick resumes it. Its released proxy
(ThunderAgent-org/ThunderAgent a7eef77) works per model here, as one such proxy stands in front of each model's engines:

- *Resume*: waiting programs, those that had started first, then new ones, then those between two calls, each group from
  the smallest on, while their tokens and a buffer fit the room of all backends together; then the largest goes first to
  the backend with most room. Who has waited `wait_max_s` is resumed in any case.
- *Pause*, where a backend has outgrown its capacity: programs between two calls, the smallest first, at once; if that
  is not enough, programs in a call are marked, the smallest first, and lose their place when it returns.

Of the released proxy's defects two change who is paused and are kept: marks count as room only when they take effect,
so that one tick over capacity marks every program in a call; and its capacity is nominal tokens, without state blocks.
"""

from loadwise.kernel.ids import BackendId, ModelId, ProgramId
from loadwise.ledger.ledger import Account

from .desk import Desk
from .dispatching import Dispatching
from .gates import PauseGate
from .program import Program, Turn

TICK = "tick:"


class Pausing:
    """Ticks while there is somebody to resume or to pause, under the gate `pause`; under the others never."""

    def __init__(self, desk: Desk, dispatching: Dispatching) -> None:
        self._desk = desk
        self._dispatching = dispatching
        self._gate = desk.admission.gate if isinstance(desk.admission.gate, PauseGate) else None

    @property
    def is_on(self) -> bool:
        """Whether the gate is `pause`."""
        return self._gate is not None

    def keep_ticking(self) -> None:
        """Have a tick due while anything holds a place or waits for one."""
        desk = self._desk
        if self._gate is None:
            return
        accounts = desk.admission.ledger.account_by_backend.values()
        is_needed = desk.admission.n_held > 0 or any(account.amount_by_key for account in accounts)
        if not is_needed:
            desk.agenda.cancel(TICK)
        elif TICK not in desk.agenda:
            desk.agenda.schedule(TICK, desk.now_s + desk.config.admission.pause.tick_s)

    def tick_due(self, key: str) -> None:
        """Resume, then pause."""
        if self._gate is None:
            return
        for model_id in list(self._desk.backends.model_by_id):
            self._resume(self._gate, model_id)
            for backend_id in self._desk.backends.all_of(model_id):
                self._pause(self._gate, backend_id)

    # --- resume ---

    def _resume(self, gate: PauseGate, model_id: ModelId) -> None:
        desk = self._desk
        usable = [b for b in desk.backends.usable(model_id, desk.now_s) if self._is_gated(b)]
        if not usable:
            return
        room = {b: gate.room_tokens(b, desk.now_s) for b in usable}
        for program, turn in self._who_fits(model_id, sum(max(tokens, 0.0) for tokens in room.values())):
            if program.is_reserved or (turn is not None and not turn.is_held):
                continue  # went on together with a sibling
            backend_id = max(usable, key=lambda b: room[b])
            gate.resumed[program.program_id] = backend_id
            if turn is not None:
                self._dispatching.try_dispatch(turn, program)
            else:
                desk.admission.reserve_again(program, backend_id, desk.now_s)
            gate.resumed.clear()
            room[backend_id] -= self._tokens(program, turn) + desk.config.admission.pause.buffer_tokens

    def _who_fits(self, model_id: ModelId, room_tokens: float) -> list[tuple[Program, Turn | None]]:
        """Waiting programs that may go on, the largest first."""
        desk, pause = self._desk, self._desk.config.admission.pause
        waiting: list[tuple[int, int, int, Program, Turn | None]] = []
        for number, turn_id in enumerate(desk.admission.order_by_model[model_id]):
            turn = desk.turns[turn_id]
            program = desk.table.by_id[turn.program_id]
            if not program.is_reserved or turn.is_side:
                group = 0 if program.admitted_at_s is not None else 1
                waiting.append((group, self._tokens(program, turn), number, program, turn))
        for number, program in enumerate(desk.table.by_id.values()):
            if self._is_paused_idle(program, model_id):
                waiting.append((2, self._tokens(program, None), number, program, None))
        waiting.sort(key=lambda entry: entry[:3])
        taken: list[tuple[int, Program, Turn | None]] = []
        used, is_full = 0.0, False
        for _, tokens, _, program, held in waiting:
            is_overdue = held is not None and desk.now_s - held.arrived_at_s >= pause.wait_max_s
            is_full = is_full or used + tokens + pause.buffer_tokens > room_tokens
            if not is_full or is_overdue:
                used += tokens + pause.buffer_tokens
                taken.append((tokens, program, held))
        taken.sort(key=lambda entry: -entry[0])
        return [(program, turn) for _, program, turn in taken]

    def _is_paused_idle(self, program: Program, model_id: ModelId) -> bool:
        is_started = program.admitted_at_s is not None and program.is_open and not program.is_implicit
        return is_started and program.model == model_id and not program.is_reserved and not program.open_turns

    @staticmethod
    def _tokens(program: Program, turn: Turn | None) -> int:
        return program.tokens if turn is None else max(program.context_tokens, turn.needed_tokens)

    # --- pause ---

    def _pause(self, gate: PauseGate, backend_id: BackendId) -> None:
        if not self._is_gated(backend_id) or gate.room_tokens(backend_id) >= 0:
            return
        desk = self._desk
        account = desk.admission.ledger.account_by_backend[backend_id]
        programs = sorted(self._programs(account), key=lambda program: program.tokens)
        for program in programs:
            if not program.n_covered:
                desk.counts.pauses += 1
                desk.admission.release_program(program)
                if gate.room_tokens(backend_id) >= 0:
                    return
        for program in programs:
            if program.n_covered and not program.is_marked:
                desk.counts.pauses += 1
                program.is_marked = True

    def _programs(self, account: Account) -> list[Program]:
        by_id = self._desk.table.by_id
        return [by_id[ProgramId(key)] for key in account.amount_by_key if key in by_id]

    def _is_gated(self, backend_id: BackendId) -> bool:
        return self._desk.admission.is_gated(backend_id)
