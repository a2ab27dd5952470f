"""The router's whole state as plain values: what a snapshot holds, so that recovery need not replay from the start."""

from typing import TYPE_CHECKING

import msgspec

from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import ModelSpec
from loadwise.ledger.demand import Demand
from loadwise.ledger.ledger import Account

from .backends import BackendState
from .credit import CreditState
from .gate import GateState
from .program import Program, Turn

if TYPE_CHECKING:
    from .machine import Router


class Counts(msgspec.Struct, kw_only=True):
    """What has happened since the journal began."""

    arrived: int = 0
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    evicted: int = 0
    cancelled: int = 0
    held: int = 0
    """Turns that had to wait at least once."""
    forgotten: int = 0
    """Programs that never got an answer."""
    censored: int = 0
    stale: int = 0
    """Events about something that was already over."""
    verdicts_stale: int = 0
    verdicts_late: int = 0
    verdicts_abstained: int = 0


class RouterState(Fact, frozen=True, kw_only=True):
    """A dump of `Router`."""

    now_s: float
    timer_at_s: float | None
    models: dict[str, ModelSpec]
    backends: list[BackendState]
    accounts: dict[str, Account]
    demands: dict[str, Demand]
    orders: dict[str, list[int]]
    credit: CreditState
    gate: GateState
    agenda: list[tuple[str, float]]
    programs: list[Program]
    idle: list[str]
    verifying: list[str]
    closed: list[tuple[str, float]]
    turns: list[Turn]
    asked: dict[int, str]
    counts: Counts
    n_decisions: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RouterState).decode


def dump_router(router: "Router") -> bytes:
    """Encode the state; dicts keep their order, which carries meaning."""
    table, admission = router.table, router.admission
    return _encode(
        RouterState(
            now_s=router.now_s,
            timer_at_s=router.timer_at_s,
            models={str(name): model for name, model in router.backends.model_by_id.items()},
            backends=list(router.backends.by_id.values()),
            accounts=admission.ledger.account_by_backend,
            demands={str(name): demand for name, demand in admission.demand_by_model.items()},
            orders={str(name): list(order) for name, order in admission.order_by_model.items()},
            credit=router.credit.dump(),
            gate=router.gate.dump(),
            agenda=router.agenda.dump(),
            programs=list(table.by_id.values()),
            idle=list(table.idle),
            verifying=list(table.verifying),
            closed=list(table.closed.items()),
            turns=list(router.turns.values()),
            asked={int(key): str(value) for key, value in router.asked.items()},
            counts=router.counts,
            n_decisions=router.routing.n_decisions,
        )
    )


def load_router(router: "Router", dumped: bytes) -> None:
    """Continue from a dump. Models and backends of the dump that the configuration lacks are kept."""
    state = _decode(dumped)
    _load_pool(router, state)
    router.now_s, router.timer_at_s = state.now_s, state.timer_at_s
    router.credit.load(state.credit)
    router.gate.load(state.gate)
    router.agenda.load(state.agenda)
    router.turns = {turn.turn_id: turn for turn in state.turns}
    table = router.table
    table.by_id = {program.program_id: program for program in state.programs}
    table.idle = {ProgramId(p): None for p in state.idle}
    table.verifying = {ProgramId(p): None for p in state.verifying}
    table.closed = {ProgramId(p): at_s for p, at_s in state.closed}
    router.asked = {DecisionId(key): ProgramId(value) for key, value in state.asked.items()}
    router.counts = state.counts
    router.routing.n_decisions = state.n_decisions


def _load_pool(router: "Router", state: RouterState) -> None:
    admission = router.admission
    for name, model in state.models.items():
        if ModelId(name) not in router.backends.model_by_id:
            router.backends.add_model(ModelId(name), model)
        admission.add_model(ModelId(name))
    for backend in state.backends:
        backend_id = BackendId(backend.spec.name)
        if backend_id not in router.backends.by_id:
            router.backends.add(backend.spec)
        known = router.backends.by_id[backend_id]
        known.health, known.n_running = backend.health, backend.n_running
        known.n_failures, known.quiet_until_s = backend.n_failures, backend.quiet_until_s
        known.signals = backend.signals
    admission.ledger.account_by_backend = state.accounts
    for state_of in router.backends.by_id.values():
        admission.add_backend(state_of.spec)
    admission.demand_by_model.update({ModelId(name): demand for name, demand in state.demands.items()})
    admission.n_held = 0
    for name, order in state.orders.items():
        for turn_id in order:
            admission.order_by_model[ModelId(name)].push(TurnId(turn_id))
            admission.n_held += 1
