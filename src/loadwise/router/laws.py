"""The router's laws, checked over its whole state: what must hold after every event (docs/laws.md)."""

from collections import Counter
from collections.abc import Callable

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import BackendId, DecisionId, ProgramId, TurnId
from loadwise.kernel.work import ProgramState

from .config import ATTEMPTS_MAX
from .credit import SETTLED_MAX
from .desk import CALLED_OFF_MAX, Desk
from .program import FORGOTTEN_STATES, Program


def check(desk: Desk) -> None:
    """Raise `LawBroken` where L1, L2, L4, L5, L9, L11 or L15 does not hold."""
    _check_turns(desk)
    desk.admission.check(desk.table.by_id, desk.turns, desk.now_s)
    for program in desk.table.by_id.values():
        _check_program(desk, program)
    _check_credit(desk)
    _check_table(desk)
    _check_bounds(desk)
    _check_spending(desk)
    _check_agenda(desk)


def _check_turns(desk: Desk) -> None:
    counts = desk.counts
    ended = counts.completed + counts.failed + counts.rejected + counts.evicted + counts.cancelled
    if counts.arrived != ended + len(desk.turns):
        raise LawBroken("L1", f"{counts.arrived} turns arrived, {ended} ended, {len(desk.turns)} are open")
    open_turns = [turn_id for program in desk.table.by_id.values() for turn_id in program.open_turns]
    if sorted(open_turns) != sorted(desk.turns):
        raise LawBroken("L2", "the programs' open turns are not the open turns")
    for turn in desk.turns.values():
        waits, is_due = turn.waits_since_s is not None, f"hold:{turn.turn_id}" in desk.agenda
        if not waits == is_due == (turn.backend_id is None):
            raise LawBroken(
                "L15", f"turn {turn.turn_id} runs on {turn.backend_id!r}; waiting {waits}, bounded {is_due}"
            )
        if turn.is_held and not waits:
            raise LawBroken("L15", f"turn {turn.turn_id} is held and does not wait")
    running = Counter(turn.backend_id for turn in desk.turns.values())
    for backend_id, state in desk.backends.by_id.items():
        if state.n_running != running[backend_id]:
            raise LawBroken("L2", f"backend {backend_id!r} counts {state.n_running} turns, not {running[backend_id]}")
        if state.load.n_calls != state.n_running:
            raise LawBroken("L2", f"backend {backend_id!r} reckons with {state.load.n_calls} calls")


def _check_program(desk: Desk, program: Program) -> None:
    name, state = program.program_id, program.state
    is_pending = program.decision_id in desk.credit.pending_by_decision
    if program.is_credited and is_pending:
        raise LawBroken("L11", f"program {name!r} is credited and still pending")
    if program.is_credited and program.n_side_turns:
        raise LawBroken("L11", f"program {name!r} is credited to {program.model!r}, and another model has worked on it")
    if state is ProgramState.VERIFYING and not is_pending:
        raise LawBroken("L11", f"program {name!r} waits for a verdict nobody can use")
    if state in FORGOTTEN_STATES:
        raise LawBroken("L1", f"program {name!r} is {state} and not forgotten")
    if not program.is_open and (program.open_turns or program.is_reserved):
        raise LawBroken("L4", f"program {name!r} is {state} and holds turns or a reservation")
    _check_attempts(desk, program)
    turns = [desk.turns[turn_id] for turn_id in program.open_turns]
    n_covered = sum(1 for turn in turns if turn.backend_id is not None and not turn.has_own_reservation)
    if n_covered != program.n_covered:
        raise LawBroken("L5", f"program {name!r} covers {n_covered} attempts, not {program.n_covered}")
    if program.asked_decision_id is not None and desk.asked.get(program.asked_decision_id) != name:
        raise LawBroken("L15", f"program {name!r} waits for a selector that was not asked")


def _check_attempts(desk: Desk, program: Program) -> None:
    """Attempts end, each on a model of its own, and each decision has earned once at most."""
    if not program.attempts:
        return
    models = [program.model, *(attempt.model for attempt in program.attempts)]
    decisions = [program.decision_id, *(attempt.decision_id for attempt in program.attempts)]
    if len(models) > ATTEMPTS_MAX:
        raise LawBroken(
            "L15", f"program {program.program_id!r} has {len(models)} attempts; {ATTEMPTS_MAX} is the limit"
        )
    if len({*models}) < len(models) or len({*decisions}) < len(decisions):
        raise LawBroken("L11", f"program {program.program_id!r} has tried {models} by decisions {decisions}")
    for attempt in program.attempts:
        if attempt.decision_id in desk.credit.pending_by_decision:
            raise LawBroken("L11", f"decision {attempt.decision_id} of an attempt that is over is still pending")


def _check_credit(desk: Desk) -> None:
    live = {p.decision_id: p.model for p in desk.table.by_id.values() if p.is_open or p.state is ProgramState.VERIFYING}
    for decision_id, pending in desk.credit.pending_by_decision.items():
        if live.get(decision_id) != pending.model:
            raise LawBroken("L11", f"decision {decision_id} pends for {pending.model!r} and belongs to no live program")

    both = desk.credit.pending_by_decision.keys() & desk.credit.settled_by_decision.keys()
    if both:
        raise LawBroken("L11", f"decision {min(both)} is pending and settled")
    if len(desk.credit.settled_by_decision) > SETTLED_MAX:
        raise LawBroken("L15", f"{len(desk.credit.settled_by_decision)} settled decisions exceed {SETTLED_MAX}")


def _check_table(desk: Desk) -> None:
    table = desk.table
    idle = {p.program_id for p in table.by_id.values() if p.is_open and not p.open_turns}
    verifying = {p.program_id for p in table.by_id.values() if p.state is ProgramState.VERIFYING}
    closed = {p.program_id for p in table.by_id.values() if not p.is_open} - verifying
    for what, listed, there in (
        ("idle", set(table.idle), idle),
        ("verifying", set(table.verifying), verifying),
        ("closed", set(table.closed), closed),
    ):
        if listed != there:
            raise LawBroken("L15", f"listed as {what}, or missing there: {sorted(listed ^ there)}")


def _check_bounds(desk: Desk) -> None:
    limits = (
        (len(desk.turns), desk.config.turns_max, "open turns"),
        (desk.table.n_open, desk.config.programs_max, "open programs"),
        (len(desk.table.verifying), desk.config.verifying_max, "programs without a verdict"),
        (len(desk.called_off), CALLED_OFF_MAX, "attempts taken back"),
        (len(desk.table.closed), desk.config.closed_max, "closed programs"),
        (desk.admission.n_held, desk.config.held_max, "held turns"),
        (len(desk.agenda), 5 + 4 * len(desk.table.by_id) + len(desk.turns) + 3 * len(desk.backends.by_id), "dues"),
    )
    for n, limit, what in limits:
        if n > limit:
            raise LawBroken("L15", f"{n} {what} exceed {limit}")
    for program_id in (*desk.pacing.waiting, *desk.pacing.slot_by_program, *desk.asked.values()):
        program = desk.table.by_id.get(program_id)
        if program is None or not (program.is_open or program.state is ProgramState.VERIFYING):
            raise LawBroken("L15", f"program {program_id!r} is over and still waits to start or for the selector")
    if desk.pacing.next_may_start:
        raise LawBroken("L15", f"program {next(iter(desk.pacing.waiting))!r} waits although it may start")


def _check_spending(desk: Desk) -> None:
    """Every promise of money is one turn's, or one attempt's that was taken back and may still cost something."""
    if desk.spending.purse is None:
        return
    held = [turn.promise for turn in desk.turns.values()] + [gone.promise for gone in desk.called_off.values()]
    owners = Counter(filter(None, held))
    promised = desk.spending.purse.open
    if set(owners) != set(promised) or any(n > 1 for n in owners.values()):
        raise LawBroken("L5", f"money is promised under {sorted(promised)}, and turns hold {sorted(owners.elements())}")


def _check_agenda(desk: Desk) -> None:
    """Everything due is about something alive."""
    by_id = desk.table.by_id

    def is_open(key: str) -> bool:
        program = by_id.get(ProgramId(key))
        return program is not None and program.is_open

    def is_backend(key: str) -> bool:
        return BackendId(key) in desk.backends.by_id

    is_alive: dict[str, Callable[[str], bool]] = {
        "idle": is_open,
        "budget": is_open,
        "verdict": lambda key: ProgramId(key) in desk.table.verifying,
        "hold": lambda key: TurnId(int(key)) in desk.turns,
        "selector": lambda key: DecisionId(int(key)) in desk.asked,
        "closed": lambda key: bool(desk.table.closed),
        "retry": is_backend,
        "quiet": is_backend,
        "window": is_backend,
        "tick": lambda key: bool(desk.admission.n_held or desk.table.by_id),
    }
    for name, _ in desk.agenda.dump():
        kind, _, key = name.partition(":")
        if not is_alive[kind](key):
            raise LawBroken("L15", f"{name!r} is due, which is over")
