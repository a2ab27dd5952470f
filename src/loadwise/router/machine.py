"""The router: turns in, dispatches out.

Theory of operation. A program is *routed* once, at its first turn: the policy chooses a model, the decision is recorded
and becomes pending. It is *admitted* when a backend of that model can reserve what it will need; until then its turns
are *held*, first in, first out per model, never longer than `hold_max_s`. While the program lives its reservation
follows its context. When it *ends* (told, final turn, idle) slot and reservation are released first, and only then is
it verified. A *verdict* finds its decision through the program id, whenever it comes: the learner learns, the program
closes.

A program that never got an answer (rejected, failed) is forgotten and its decision undone, so the client's retry under
the same id is a new program. Retries and fallbacks happen only before the first byte reached the client; a program that
has had an answer keeps its model.

The walk of one turn, file by file:

    TurnArrived ──▶ arriving ──▶ binding ──▶ dispatching ──▶ Dispatch        (the first turn of a program)
                        └───────────────────────▲                            (every later one)
    AttemptEnded ─▶ attempts ─▶ ending                                       (complete, or failed for good)
                        ├──▶ dispatching ──▶ Dispatch                        (another replica)
                        └──▶ binding ──▶ dispatching ──▶ Dispatch            (another model)
    ProgramEnded, VerdictArrived ──▶ lifecycle ──▶ Verify, RecordCredit, Archive
                                         └──▶ escalation ──▶ binding        (another attempt, where that is configured)

No part starts another's turn: what has become free is noted (`backends.roomy`, `pacing`), and when the event has been
dealt with, held turns and waiting programs start, in order. Everything that waits is on the agenda, and the host has
one timer: the earliest thing due.

References: ORACLE, sections 4.1 to 4.3, appendices B.2 and E.9.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.ids import DecisionId, ProgramId, TurnId
from loadwise.kernel.pool import BackendSpec, ModelSpec
from loadwise.policy.registry import Resolve
from loadwise.verify.debias import ErrorRates

from .arriving import Arriving
from .attempts import Attempts
from .binding import Binding
from .config import RouterConfig
from .counts import Counts
from .desk import Desk
from .dispatching import Dispatching
from .ending import Ending
from .escalation import Escalation
from .laws import check
from .lifecycle import EXTERNAL as EXTERNAL
from .lifecycle import Lifecycle
from .pausing import Pausing
from .pool import PoolChanges
from .program import Turn
from .state import dump_router, load_router

TIMER = "router"
TURN_IDS = (-(1 << 63), (1 << 64) - 1)
"""The lowest and the highest that a journal can hold."""

_encode_into = msgspec.msgpack.Encoder().encode_into
_scratch = bytearray()


def _is_writable(event: e.Event) -> bool:
    """Whether a journal or a dump can hold it: no lone surrogates, no integers beyond 64 bits.

    Encoding it is the cheapest way to look at every field (a third of a microsecond), and the only one that forgets
    none.
    """
    try:
        _encode_into(event, _scratch)
    except (UnicodeEncodeError, OverflowError):
        return False
    except TypeError:  # a host's own kind of number; its journal would say so
        return True
    return True


def _writable(event: e.AttemptEnded) -> e.AttemptEnded:
    """The same end of an attempt, with the largest number there is where its usage says a larger one."""
    usage = event.usage
    counts = {name: min(getattr(usage, name), TURN_IDS[1]) for name in usage.__struct_fields__ if name != "is_exact"}
    return msgspec.structs.replace(event, usage=msgspec.structs.replace(usage, **counts), status=0, detail="")


class Router:
    """Subsystem 1 as a machine; see the module's theory of operation."""

    def __init__(
        self,
        models: dict[str, ModelSpec],
        backends: tuple[BackendSpec, ...],
        config: RouterConfig,
        verifier_by_task_type: Mapping[str, str],
        seed: int,
        *,
        resolve: Resolve | None = None,
        error_rates: Mapping[str, ErrorRates] | None = None,
    ) -> None:
        """
        Args:
            resolve: loads users' policy classes by their dotted paths; without it such a path is a ConfigError.
            error_rates: how often the verifiers of task types are wrong, where that is known.
        """
        self.desk = desk = Desk(models, backends, config, verifier_by_task_type, seed, resolve, error_rates)
        self.config = config
        self.backends = desk.backends
        self.admission = desk.admission
        self.credit = desk.credit
        self.routing = desk.routing
        self.pacing = desk.pacing
        self.spending = desk.spending
        self.agenda = desk.agenda
        self.table = desk.table
        ending = Ending(desk)
        self._dispatching = Dispatching(desk, ending)
        self._pausing = Pausing(desk, self._dispatching)
        self._binding = Binding(desk, ending, self._dispatching)
        escalation = Escalation(desk, ending, self._binding)
        lifecycle = Lifecycle(desk, ending, escalation)
        arriving = Arriving(desk, ending, lifecycle, self._binding, self._dispatching, escalation)
        attempts = Attempts(desk, ending, self._dispatching, self._binding, lifecycle)
        self._arriving = arriving
        self._pool = pool = PoolChanges(desk, ending)
        self._handler_by_event: dict[type, Callable[[Any], None]] = {
            e.TurnArrived: arriving.turn_arrived,
            e.AttemptEnded: attempts.attempt_ended,
            e.TurnAbandoned: attempts.turn_abandoned,
            e.ProgramEnded: lifecycle.program_ended,
            e.VerdictArrived: lifecycle.verdict_arrived,
            e.SelectorAnswered: self._binding.selector_answered,
            e.SignalsObserved: pool.signals_observed,
            e.BackendAdded: pool.backend_added,
            e.BackendChanged: pool.backend_changed,
            e.BackendRemoved: pool.backend_removed,
            e.ModelForgotten: pool.model_forgotten,
            e.TimerFired: self._timer_fired,
            e.HostRestarted: self._host_restarted,
        }
        self._due_by_kind: dict[str, Callable[[str], None]] = {
            "idle": lifecycle.idle_due,
            "hold": self._dispatching.hold_due,
            "budget": lifecycle.budget_due,
            "verdict": lifecycle.verdict_due,
            "closed": lifecycle.closed_due,
            "selector": self._binding.selector_due,
            "retry": pool.retry_due,
            "quiet": pool.quiet_due,
            "window": pool.window_due,
            "tick": self._pausing.tick_due,
        }

    @property
    def heard_events(self) -> tuple[type, ...]:
        """The event types that this machine listens for."""
        return tuple(self._handler_by_event)

    @property
    def counts(self) -> Counts:
        """What has happened since the journal began."""
        return self.desk.counts

    @property
    def turns(self) -> dict[TurnId, Turn]:
        """Open turns."""
        return self.desk.turns

    @property
    def asked(self) -> dict[DecisionId, ProgramId]:
        """Programs for which the user's selector has been asked."""
        return self.desk.asked

    @property
    def now_s(self) -> float:
        """The instant of the latest event."""
        return self.desk.now_s

    def handle(self, event: e.Event) -> list[c.Command]:
        """Take one event and say what the host must do, in order."""
        desk = self.desk
        out: list[c.Command] = []
        desk.out = out
        desk.now_s = event.at_s
        next_at_s = self.agenda.next_at_s
        if next_at_s is not None and next_at_s <= event.at_s and type(event) is not e.HostRestarted:
            self._run_due()
        handler = self._handler_by_event[type(event)] if _is_writable(event) else self._refuse_unwritable
        handler(event)
        if self.backends.roomy or desk.admission.n_held or desk.pacing.waiting:
            self._start_waiting()
        if self._pausing.is_on:
            self._pausing.keep_ticking()
        next_at_s = self.agenda.next_at_s
        if next_at_s is not None and (desk.timer_at_s is None or next_at_s < desk.timer_at_s):
            desk.timer_at_s = next_at_s
            out.append(c.SetTimer(timer=TIMER, fires_at_s=next_at_s))
        return out

    def follow(self, decisions: Sequence[c.RecordDecision]) -> None:
        """Decide in the next event as it was recorded, where the model is still a candidate."""
        self.routing.recorded = {decision.decision_id: decision for decision in decisions}

    def _refuse_unwritable(self, event: e.Event) -> None:
        """Nothing of it may enter the state, or no dump could be written; a client is still told."""
        if isinstance(event, e.TurnArrived) and TURN_IDS[0] <= event.turn_id <= TURN_IDS[1]:
            self._arriving.refuse_unwritable(event)
        elif isinstance(event, e.AttemptEnded):
            self._handler_by_event[e.AttemptEnded](_writable(event))  # an attempt that ended has ended
        else:
            self.desk.counts.malformed += 1

    def _start_waiting(self) -> None:
        """Start whoever may start now: held turns, then programs whose start is paced, until nothing moves."""
        desk = self.desk
        if desk.admission.n_held and desk.config.order.kind == "fair":
            self._dispatching.note_heads()
        while True:
            if self.backends.roomy:
                desk.admission.is_stirred |= not desk.admission.calm.issuperset(self.backends.roomy)
                desk.admission.calm.clear()
                self._dispatching.start_held()
            if desk.admission.n_held and self._dispatching.move_held():
                continue
            if not self._binding.start_next():
                return

    def _run_due(self) -> None:
        """Do what is due before the event at hand, so that a late timer changes little."""
        for name in self.agenda.pop_due(self.desk.now_s):
            kind, _, key = name.partition(":")
            self._due_by_kind[kind](key)
            self._start_waiting()

    def _timer_fired(self, event: e.TimerFired) -> None:
        if event.timer == TIMER:
            self.desk.timer_at_s = None
        else:
            self.desk.counts.stale += 1

    def _host_restarted(self, event: e.HostRestarted) -> None:
        """First the dead turns, then what came due meanwhile: nothing is dispatched for a client that is gone."""
        self._pool.host_restarted()
        self._run_due()

    def check(self) -> None:
        """Raise `LawBroken` where L1, L2, L4, L5, L9, L11 or L15 does not hold."""
        check(self.desk)

    def dump(self) -> bytes:
        """The whole state; see `router.state`."""
        return dump_router(self.desk)

    def load(self, state: bytes) -> None:
        """Continue from a dumped state; see `router.state.load_router` for another configuration."""
        load_router(self.desk, self._pool, state)
