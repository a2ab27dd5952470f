"""The router's whole state as plain values: what a snapshot holds, so that recovery need not replay from the start."""

from contextlib import suppress

import msgspec

from loadwise.kernel.errors import SchemaMismatch
from loadwise.kernel.fact import Fact
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import ModelSpec
from loadwise.ledger.demand import Demand
from loadwise.ledger.forecast import Errors
from loadwise.ledger.ledger import Account
from loadwise.ledger.overhead import Overhead
from loadwise.ledger.pace import Pace
from loadwise.ledger.residency import Residency

from .backends import BackendState
from .counts import Counts
from .credit import CreditState
from .desk import Desk
from .forgone import Forgone
from .order import standing
from .pacing import PacingState
from .pool import PoolChanges
from .program import CalledOff, Program, Turn
from .spending import SpendingState
from .successes import Cell


class RouterState(Fact, frozen=True, kw_only=True):
    """A dump of the router."""

    now_s: float
    timer_at_s: float | None
    configured_pool: str
    """Digest of the models and backends of the configuration under which it was dumped."""
    models: dict[str, ModelSpec]
    backends: list[BackendState]
    accounts: dict[str, Account]
    demands: dict[str, Demand]
    orders: dict[str, list[int]]
    passes: dict[str, dict[str, float]] = {}
    """Of orders that remember more than their turns."""
    overheads: dict[str, Overhead] = {}
    residencies: dict[str, Residency] = {}
    """Of caches, by `Books.cache`."""
    paces: dict[str, Pace] = {}
    forecast_errors: Errors = msgspec.field(default_factory=Errors)
    forgone: Forgone = msgspec.field(default_factory=Forgone)
    successes: dict[str, dict[str, Cell]] = {}
    replica_policy: bytes
    credit: CreditState
    pacing: PacingState
    agenda: list[tuple[str, float]]
    programs: list[Program]
    idle: list[str]
    verifying: list[str]
    closed: list[tuple[str, float]]
    turns: list[Turn]
    called_off: list[tuple[int, CalledOff]] = []
    asked: dict[int, str]
    counts: Counts
    n_decisions: int
    ladder: bytes = b""
    spending: SpendingState | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RouterState).decode


def dump_router(desk: Desk) -> bytes:
    """Encode the state; dicts keep their order, which carries meaning."""
    table, admission = desk.table, desk.admission
    return _encode(
        RouterState(
            now_s=desk.now_s,
            timer_at_s=desk.timer_at_s,
            configured_pool=desk.configured_pool,
            models={str(name): model for name, model in desk.backends.model_by_id.items()},
            backends=list(desk.backends.by_id.values()),
            accounts=admission.ledger.account_by_backend,
            demands={str(name): demand for name, demand in admission.demand_by_model.items()},
            orders={str(name): list(order) for name, order in admission.order_by_model.items()},
            passes={str(name): passes for name, o in admission.order_by_model.items() if (passes := o.dump())},
            overheads={str(name): overhead for name, overhead in admission.books.overhead_by_backend.items()},
            residencies=admission.books.residency_by_cache,
            paces={str(name): pace for name, pace in admission.books.pace_by_backend.items()},
            forecast_errors=desk.divert.waiting.errors,
            forgone=desk.divert.forgone,
            successes=desk.routing.successes.cells,
            replica_policy=admission.replica_policy.dump(),
            credit=desk.credit.dump(),
            pacing=desk.pacing.dump(),
            agenda=desk.agenda.dump(),
            programs=list(table.by_id.values()),
            idle=list(table.idle),
            verifying=list(table.verifying),
            closed=list(table.closed.items()),
            turns=list(desk.turns.values()),
            called_off=list(desk.called_off.items()),
            asked={int(key): str(value) for key, value in desk.asked.items()},
            counts=desk.counts,
            n_decisions=desk.routing.n_decisions,
            ladder=b"" if desk.ladder is None else desk.ladder.dump(),
            spending=desk.spending.dump(),
        )
    )


def load_router(desk: Desk, pool: PoolChanges, dumped: bytes) -> None:
    """Continue from a dump, exactly, under the same configuration and seed.

    Where the pool file has changed since, its differences are applied to the dumped state as if an operator had made
    them: backends that left the file are removed, new ones join, and what events had added meanwhile stays. The host
    says `HostRestarted` next, so nobody misses the commands of that.
    """
    state = _decode(dumped)
    models = dict(desk.backends.model_by_id)
    specs = [known.spec for known in desk.backends.by_id.values()]
    desk.backends.replace({ModelId(name): model for name, model in state.models.items()}, state.backends)
    _load_admission(desk, state)
    _load_tables(desk, state)
    if state.configured_pool != desk.configured_pool:
        for model_id, model in models.items():
            pool.add_model(model_id, model)
        pool.follow_file(specs)


def _load_admission(desk: Desk, state: RouterState) -> None:
    admission = desk.admission
    admission.ledger.account_by_backend = state.accounts
    books = admission.books
    books.demand_by_model = {ModelId(name): demand for name, demand in state.demands.items()}
    books.model_by_backend = {BackendId(b.spec.name): ModelId(b.spec.model) for b in state.backends}
    known = books.overhead_by_backend
    books.overhead_by_backend = {
        b: state.overheads.get(b) or known.get(b) or admission.new_overhead() for b in books.model_by_backend
    }
    books.residency_by_cache = dict(state.residencies) if desk.residing.is_on else {}
    books.pace_by_backend = {BackendId(name): pace for name, pace in state.paces.items()}
    with suppress(SchemaMismatch):  # another replica policy is configured now: it begins anew
        admission.replica_policy.load(state.replica_policy)
    admission.order_by_model.clear()
    admission.n_held = 0
    turns = {turn.turn_id: turn for turn in state.turns}
    programs = {program.program_id: program for program in state.programs}
    for name, order in state.orders.items():
        admission.add_model(ModelId(name))
        made = admission.order_by_model[ModelId(name)]
        for turn_id in map(TurnId, order):
            made.push(turn_id, standing(turns[turn_id], programs[turns[turn_id].program_id]))
            admission.n_held += 1
        made.load(state.passes.get(name, {}))


def _load_tables(desk: Desk, state: RouterState) -> None:
    desk.now_s, desk.timer_at_s = state.now_s, state.timer_at_s
    desk.credit.load(state.credit)
    desk.pacing.load(state.pacing)
    desk.spending.load(state.spending)
    desk.agenda.load(state.agenda)
    desk.turns = desk.admission.turns = {turn.turn_id: turn for turn in state.turns}
    desk.called_off = {TurnId(turn_id): called_off for turn_id, called_off in state.called_off}
    table = desk.table
    table.by_id = {program.program_id: program for program in state.programs}
    desk.admission.books.programs = table.by_id
    table.idle = {ProgramId(p): None for p in state.idle}
    table.verifying = {ProgramId(p): None for p in state.verifying}
    table.closed = {ProgramId(p): at_s for p, at_s in state.closed}
    desk.asked = {DecisionId(key): ProgramId(value) for key, value in state.asked.items()}
    desk.counts = state.counts
    desk.divert.waiting.errors = state.forecast_errors
    desk.divert.forgone = state.forgone
    desk.routing.successes.cells = state.successes
    desk.routing.n_decisions = state.n_decisions
    if not _load_ladder(desk, state.ladder):
        for program in state.programs:
            program.taught.clear()  # what no ladder knows cannot be taken back from it


def _load_ladder(desk: Desk, state: bytes) -> bool:
    """Whether the ladder goes on from its dump; under another context or other rates it begins anew."""
    if desk.ladder is None or not state:
        return False
    try:
        desk.ladder.load(state)
    except SchemaMismatch:
        return False
    return True
