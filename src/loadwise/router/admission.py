"""Which backend a turn runs on, and whether it may start now: reservations, holds, replicas.

A program reserves on one backend for as long as it lives (KV tokens, slots). Turns on backends counted in requests per
minute, and *side turns* (pinned to another model than their program's), are covered one by one instead. Turns that do
not fit are held per model in its order; a model's head may take any of its backends. Which programs may start is the
gate's word (`gates`).

Among replicas a program goes where its context still is; a new one where the replica policy says. A replica that has
just joined, or come back, is cold: it takes every second new program, until it has as many as the least of the others.
At once, so that it helps; not all, since programs that begin together grow together, and nobody knows yet whether its
engine answers.

A call of a program that has its place may still have to wait, where a ceiling on calls is configured: it then stands in
its model's order like all others, and whenever a call returns it need not be at the head to go on.
"""

from collections.abc import Mapping

import numpy as np

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import BackendId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import CAPACITY_MAX, BackendSpec, CapacityUnit
from loadwise.kernel.streams import Streams
from loadwise.ledger.demand import Demand
from loadwise.ledger.ledger import Ledger
from loadwise.ledger.overhead import Overhead
from loadwise.ledger.pace import Pace
from loadwise.policy.base import Candidate, Context, Policy
from loadwise.policy.guarded import Report, guarded
from loadwise.policy.registry import Resolve, make_policy

from .backends import Backends
from .config import RouterConfig
from .gates import Books, make_gate
from .order import Order, make_order, standing
from .program import TURN_KEY_PREFIX, Program, Turn

_NO_CONTEXT = np.zeros(0)


class Admission:
    """Reserves, holds and releases; knows nothing of policies for models or of verdicts.

    Whatever gives something back notes the model in `Backends.roomy`, so that no caller can forget who waits for it.
    """

    def __init__(
        self,
        config: RouterConfig,
        backends: Backends,
        streams: Streams,
        resolve: Resolve | None,
        report: Report,
    ) -> None:
        self._config = config
        self._backends = backends
        self._streams = streams
        self.replica_policy: Policy = guarded(make_policy(config.replica_policy, resolve=resolve), report)
        self.ledger = Ledger(config.admission_ratio)
        self.books = Books(self.ledger)
        self.gate = make_gate(config.admission, self.books)
        self.order_by_model: dict[ModelId, Order] = {}
        self.turns: Mapping[TurnId, Turn] = {}
        """Open turns, of the desk."""
        self.books.order_by_model = self.order_by_model
        self.n_held = 0
        self.is_stirred = False
        """Something has changed since nobody could be moved to another model."""
        self.calm: set[ModelId] = set()
        """Models that are noted as roomy for small changes alone: the head may fit, but no move has become better."""
        self._has_own_gate = config.admission.kind == "footprint"
        """Its word depends on contexts, not on amounts: it may change with every answer."""
        for model_id in backends.model_by_id:
            self.add_model(model_id)
        for state in backends.by_id.values():
            self.add_backend(state.spec)

    @property
    def demand_by_model(self) -> dict[ModelId, Demand]:
        """What is known of the programs of each model."""
        return self.books.demand_by_model

    def add_model(self, model_id: ModelId) -> None:
        """A model joined the pool."""
        model = self._backends.model_by_id[model_id]
        tokens, run_s = model.expected_tokens, model.expected_run_s
        demand = Demand(
            prior_tokens=self._config.expected_tokens if tokens is None else tokens,
            prior_run_s=self._config.expected_run_s if run_s is None else run_s,
        )
        self.demand_by_model.setdefault(model_id, demand)
        self.order_by_model.setdefault(model_id, make_order(self._config.order))

    def add_backend(self, spec: BackendSpec) -> None:
        """A backend joined the pool, or its capacity changed."""
        unit, capacity = spec.capacity
        backend_id = BackendId(spec.name)
        known = self.ledger.account_by_backend.get(spec.name)
        if known is None or spec.declares_capacity or not known.amount_by_key:
            self.ledger.add(spec.name, unit, capacity, spec.kv_pool)
        self.books.model_by_backend[backend_id] = ModelId(spec.model)
        self.books.overhead_by_backend.setdefault(backend_id, self.new_overhead())

    def new_overhead(self) -> Overhead:
        """What is believed of a backend's running requests before any reading."""
        admission = self._config.admission
        return Overhead(start_tokens=float(admission.overhead_tokens), reads_saturated=admission.learns_saturated)

    def remove_backend(self, backend_id: BackendId) -> None:
        """A backend left the pool; nothing runs there any more."""
        cache, is_last = self.books.cache(backend_id), self.ledger.members(backend_id) == [backend_id]
        if is_last:
            self.books.residency_by_cache.pop(cache, None)
        self.ledger.remove(backend_id)
        self.books.model_by_backend.pop(backend_id, None)
        self.books.overhead_by_backend.pop(backend_id, None)
        self.books.pace_by_backend.pop(backend_id, None)

    # --- may it start? ---

    def admit(self, turn: Turn, program: Program, at_s: float, *, is_overdue: bool = False) -> BackendId | None:
        """Cover the turn by a reservation and say where it runs, or change nothing and say None.

        Args:
            is_overdue: it may not wait for the ceiling on calls any longer.
        """
        if self.may_stay(turn, program, at_s):
            if not (is_overdue or self.may_call(turn, program)):
                return None
            self._grow(program, turn)
            return program.backend_id
        for backend_id in self._replicas(turn, program, at_s):
            if self._reserve(turn, program, backend_id, at_s):
                return backend_id
        return None

    def fits(self, turn: Turn, program: Program, at_s: float) -> bool:
        """Whether `admit` would admit the turn now; changes nothing."""
        if self.may_stay(turn, program, at_s):
            return self.may_call(turn, program)
        return any(self._has_room(turn, program, b, at_s) for b in self._replicas(turn, program, at_s))

    def room_at(self, model_id: ModelId, turn: Turn, program: Program, at_s: float) -> BackendId | None:
        """Where a program that has no place yet would start at once, if it were bound to this model; or None."""
        for backend_id in self._backends.usable(model_id, at_s):
            amount = self._amount_on(turn, program, backend_id, model_id)
            if self._admits(turn, program, backend_id, amount, at_s):
                return backend_id
        return None

    def _has_room(self, turn: Turn, program: Program, backend_id: BackendId, at_s: float) -> bool:
        if self._is_at_home(turn, program, backend_id):
            return self.may_call(turn, program)
        return self._admits(turn, program, backend_id, self._amount(turn, program, backend_id), at_s)

    def _admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        if not self.is_gated(backend_id):
            return self.ledger.fits(backend_id, amount, at_s=at_s)
        return self.gate.admits(turn, program, backend_id, amount, at_s)

    def is_gated(self, backend_id: BackendId) -> bool:
        """Whether the gate is asked about the backend; other units than KV tokens are hard limits."""
        return self.ledger.unit(backend_id) is CapacityUnit.KV_TOKENS

    def reserve_again(self, program: Program, backend_id: BackendId, at_s: float) -> bool:
        """Give a started program a place while it has no turn open."""
        assert program.model is not None and not program.is_reserved
        amount = max(program.context_tokens, self.demand_by_model[program.model].expected_tokens)
        amount += self.books.overhead_tokens(backend_id)
        if not self.ledger.reserve(program.program_id, backend_id, amount, at_s=at_s, is_bound=False):
            return False
        program.is_reserved, program.is_paused, program.backend_id = True, False, backend_id
        return True

    def may_call(self, turn: Turn, program: Program) -> bool:
        """Whether the ceiling lets a call of a program go out at its place (ORACLE's 95 % per call); one always may.

        What is held against it: tokens of the calls in flight, what each holds besides them, and this call's own.
        """
        ceiling, backend_id = self._config.admission.call_ratio, program.backend_id
        if ceiling is None or backend_id is None or self.ledger.unit(backend_id) is not CapacityUnit.KV_TOKENS:
            return True
        members = [BackendId(b) for b in self.ledger.members(backend_id)]
        if not any(self._backends.by_id[b].n_running for b in members):
            return True
        return sum(self._call_share(b, turn if b == backend_id else None) for b in members) <= ceiling

    def _call_share(self, backend_id: BackendId, turn: Turn | None) -> float:
        """Share of the cache that the calls in flight fill there, and one more."""
        load, each = self._backends.by_id[backend_id].load, self.books.overhead_tokens(backend_id)
        tokens = load.tokens + each * load.n_calls + (0 if turn is None else turn.needed_tokens + each)
        return tokens / self.ledger.account_by_backend[backend_id].capacity

    def untried(self, turn: Turn, at_s: float) -> list[BackendId]:
        """Usable backends of the turn's model on which it has not failed yet."""
        assert turn.model is not None
        return [b for b in self._backends.usable(turn.model, at_s) if b not in turn.tried]

    def may_stay(self, turn: Turn, program: Program, at_s: float) -> bool:
        """Whether the program's own reservation covers the turn where it is."""
        if turn.is_side or not program.is_reserved or program.backend_id in turn.tried:
            return False
        return self._backends.is_usable(program.backend_id, at_s, may_drain=True)

    def _is_at_home(self, turn: Turn, program: Program, backend_id: BackendId) -> bool:
        """Whether the program's reservation is on that very backend."""
        return program.is_reserved and not turn.is_side and program.backend_id == backend_id

    def _reserve(self, turn: Turn, program: Program, backend_id: BackendId, at_s: float) -> bool:
        if self._is_at_home(turn, program, backend_id):
            if not self.may_call(turn, program):
                return False
            self._grow(program, turn)
            return True
        is_leaving = program.is_reserved and not turn.is_side and program.n_covered == 0
        is_bound_elsewhere = program.is_reserved and not is_leaving
        is_counted = self.ledger.unit(backend_id) is CapacityUnit.REQUESTS_PER_MINUTE
        is_own = turn.is_side or is_bound_elsewhere or is_counted
        key = turn.key if is_own else program.program_id
        amount = self._amount(turn, program, backend_id)
        if not self._admits(turn, program, backend_id, amount, at_s):
            return False
        if not self.ledger.reserve(key, backend_id, amount, at_s=at_s, is_bound=False):
            return False
        self.replica_policy.observe(turn.turn_id, backend_id, _NO_CONTEXT)
        self._note_start(backend_id, at_s)
        if is_leaving:
            self.release_program(program)
        if is_own:
            turn.has_own_reservation = True
        else:
            program.is_reserved = True
        if not turn.is_side and not is_bound_elsewhere:
            program.backend_id, program.is_paused = backend_id, False
            program.live_tokens = turn.needed_tokens
        return True

    def _amount(self, turn: Turn, program: Program, backend_id: BackendId) -> int:
        """What covers the turn: reserve(p) = max(tokens of p, expected tokens of its model) + overhead (ORACLE, B.2).

        The tokens of p are those of its context as last counted, or of the prompt at hand with what it may answer.
        """
        assert turn.model is not None
        return self._amount_on(turn, program, backend_id, turn.model)

    def _amount_on(self, turn: Turn, program: Program, backend_id: BackendId, model_id: ModelId) -> int:
        if self.ledger.unit(backend_id) is not CapacityUnit.KV_TOKENS:
            return 1
        if turn.is_side:
            return turn.needed_tokens
        tokens = max(program.context_tokens, turn.needed_tokens, self.demand_by_model[model_id].expected_tokens)
        return max(tokens - self._common(backend_id), 0) + self.books.overhead_tokens(backend_id)

    def _common(self, backend_id: BackendId) -> int:
        return self.ledger.account_by_backend[backend_id].common

    def _replicas(self, turn: Turn, program: Program, at_s: float) -> list[BackendId]:
        """Backends that may take the turn: where its prefix may still be, the policy's choice, then by headroom.

        Backends on which the turn has failed come into question only for a held turn that has no other: it stands in
        the way of all behind it.
        """
        usable = self.untried(turn, at_s)
        if not usable and turn.is_held:
            assert turn.model is not None
            usable = self._backends.usable(turn.model, at_s)
        if len(usable) < 2:
            return usable
        if not turn.is_side and program.backend_id in usable:
            return self._with_rest([program.backend_id], usable, at_s)
        by_id = self._backends.by_id
        joining = [b for b in usable if by_id[b].is_joining]
        if 0 < len(joining) < len(usable):
            others = [b for b in usable if not by_id[b].is_joining]
            if any(by_id[b].took_last for b in joining):
                return self._with_rest([self._choose(turn, program, others, at_s)], others, at_s) + joining
            return self._with_rest([self._choose(turn, program, joining, at_s)], usable, at_s)
        return self._with_rest([self._choose(turn, program, usable, at_s)], usable, at_s)

    def _choose(self, turn: Turn, program: Program, backend_ids: list[BackendId], at_s: float) -> BackendId:
        """The replica policy's choice."""
        if len(backend_ids) == 1:
            return backend_ids[0]
        candidates = [self.replica(b, at_s, turn, program) for b in backend_ids]
        rng = self._streams.at("replica", turn.turn_id)
        context = Context(decision_id=turn.turn_id, x=_NO_CONTEXT, at_s=at_s)
        return backend_ids[self.replica_policy.choose(context, candidates, rng).chosen]

    def _with_rest(self, first: list[BackendId], backend_ids: list[BackendId], at_s: float) -> list[BackendId]:
        rest = [b for b in backend_ids if b not in first]
        rest.sort(key=lambda b: -self.ledger.headroom_ratio(b, at_s=at_s))
        return first + rest

    def _note_start(self, backend_id: BackendId, at_s: float) -> None:
        """A program, or a turn of its own account, has got a place."""
        accounts = self.ledger.account_by_backend
        model_id = self.books.model_by_backend[backend_id]
        if len(self._backends.all_of(model_id)) == 1:
            self._backends.note_start(backend_id, {backend_id: len(accounts[backend_id].amount_by_key)})
            return
        usable = self._backends.usable(model_id, at_s)
        n_by_replica = {b: len(accounts[b].amount_by_key) for b in dict.fromkeys([*usable, backend_id])}
        self._backends.note_start(backend_id, n_by_replica)

    def _fresh_ratio(self, backend_id: BackendId, turn: Turn, program: Program) -> float:
        """Share of a backend's admission limit that the turn's prompt fills beyond what is cached there.

        Cached is the program's own context where it has run last, and, wherever a program is, what all begin with.
        """
        account = self.ledger.account_by_backend[backend_id]
        if account.unit is not CapacityUnit.KV_TOKENS:
            return 0.0
        model_id = self.books.model_by_backend[backend_id]
        resident = self.demand_by_model[model_id].common_tokens if account.amount_by_key else 0
        if program.backend_id == backend_id and program.model == model_id:
            resident = max(resident, program.context_tokens)
        return max(turn.prompt_tokens - resident, 0) / max(self.ledger.limit(backend_id), 1)

    def replica(self, backend_id: BackendId, at_s: float, turn: Turn, program: Program) -> Candidate:
        """A backend as a candidate of the replica policy, for a turn."""
        n_others = self._backends.n_others(backend_id, at_s, self._config.signal_max_age_s)
        headroom_ratio = self.ledger.headroom_ratio(backend_id, at_s=at_s)
        account = self.ledger.account_by_backend[backend_id]
        if account.unit is CapacityUnit.SLOTS:
            headroom_ratio -= n_others / account.capacity  # what others take of the slots is not there for ours
        return Candidate(
            name=backend_id,
            n_running=self._backends.by_id[backend_id].n_running,
            headroom_ratio=headroom_ratio,
            fresh_ratio=self._fresh_ratio(backend_id, turn, program),
            n_others=n_others,
            kv_usage_ratio=self._backends.kv_usage_ratio(backend_id, at_s, self._config.signal_max_age_s),
        )

    # --- what is held back, and given back ---

    def _grow(self, program: Program, turn: Turn) -> None:
        """Let the program's reservation grow to what a turn needs; it may pass the limit, and then admission stops."""
        backend_id = program.backend_id
        assert backend_id is not None
        if self._has_own_gate and turn.needed_tokens < program.live_tokens:
            self.stir(backend_id)  # a conversation that has been made shorter
        elif self._has_own_gate and self.n_held:
            self._stir_calmly(backend_id)  # who has grown beyond what others came to is expected to end sooner
        program.live_tokens = turn.needed_tokens
        account = self.ledger.account_by_backend[backend_id]
        if account.unit is not CapacityUnit.KV_TOKENS:
            return
        needed_tokens = max(turn.needed_tokens - account.common, 0) + self.books.overhead_tokens(backend_id)
        if needed_tokens > account.amount_by_key[program.program_id]:
            self.ledger.extend(program.program_id, backend_id, needed_tokens)

    def follow(self, program: Program, running_tokens: int) -> None:
        """Let the reservation of a program follow its context, and what runs under it."""
        assert program.model is not None and program.backend_id is not None
        if self.ledger.unit(program.backend_id) is not CapacityUnit.KV_TOKENS:
            return
        if program.is_marked and not program.n_covered:
            self.release_program(program)
            return
        expected_tokens = self.demand_by_model[program.model].expected_tokens
        amount = max(program.context_tokens, expected_tokens, running_tokens)
        amount = max(amount - self._common(program.backend_id), 0)
        amount += self.books.overhead_tokens(program.backend_id)
        if self.ledger.extend(program.program_id, program.backend_id, amount) < 0:
            self.stir(program.backend_id)
        elif self._has_own_gate:
            self._stir_calmly(program.backend_id)

    def release_program(self, program: Program) -> None:
        """Give the program's reservation back, if it has one; its binding to the backend stays as a preference."""
        if program.is_reserved:
            assert program.backend_id is not None
            self.ledger.release(program.program_id, program.backend_id)
            program.is_reserved = program.is_marked = program.is_resident = False
            self.stir(program.backend_id)

    def stir(self, backend_id: BackendId) -> None:
        """Something of the backend came free, or may have; others may share its cache."""
        for member in map(BackendId, self.ledger.members(backend_id)):
            self._backends.stir(member)
            self.calm.discard(self.books.model_by_backend[member])

    def _stir_calmly(self, backend_id: BackendId) -> None:
        """A head may fit now, for a count has changed a little; nobody has left."""
        for member in map(BackendId, self.ledger.members(backend_id)):
            model_id = self.books.model_by_backend[member]
            if model_id not in self._backends.roomy:
                self.calm.add(model_id)
                self._backends.stir(member)

    def rise(self, backend_id: BackendId) -> None:
        """A call has returned there: calls that the ceiling has kept may go on, of programs that live there first."""
        for member in map(BackendId, self.ledger.members(backend_id)):
            model_id = self.books.model_by_backend[member]
            if model_id not in self._backends.roomy:
                self.calm.add(model_id)
            self._backends.rise(member)

    def release_turn(self, turn: Turn) -> None:
        """Give the turn's own reservation back."""
        assert turn.backend_id is not None
        self.ledger.release(turn.key, turn.backend_id)
        turn.has_own_reservation = False
        self.stir(turn.backend_id)

    def learn_demand(self, program: Program, at_s: float) -> None:
        """A program has ended; where the estimate of its model's peaks falls, a held turn may fit."""
        assert program.model is not None
        demand = self.demand_by_model[program.model]
        demand.learn(program.peak_tokens)
        if program.admitted_at_s is not None and not program.n_side_turns:  # else its time is not one model's
            demand.learn_run(at_s - program.admitted_at_s)
            if self._has_own_gate and program.backend_id is not None:
                self._pace(program.backend_id).learn_end(program.n_turns - program.n_turns_before)
        self._stir_pool(program.model)

    def learn_first(self, program: Program, backend_id: BackendId, cached_tokens: int) -> None:
        """A program's first call was answered: what was found of its prompt may be what all programs begin with."""
        if self._config.admission.shares_prompts and len(self.ledger.account_by_backend[backend_id].amount_by_key) > 1:
            demand = self.demand_by_model[self.books.model_by_backend[backend_id]]
            demand.learn_first(cached_tokens)
            self.ledger.set_common(backend_id, demand.common_tokens)
            self.stir(backend_id)

    def learn_overdue(self, program: Program, at_s: float) -> None:
        """A program has run out of time while it ran."""
        assert program.model is not None and program.admitted_at_s is not None
        demand = self.demand_by_model[program.model]
        demand.learn_overdue(program.context_tokens, at_s - program.admitted_at_s)
        if self._has_own_gate and program.backend_id is not None:
            self._pace(program.backend_id).learn_cut(program.n_turns - program.n_turns_before, program.peak_tokens)
            self._stir_pool(program.model)  # the program may have been parked, so that nothing else has said so

    def learn_pace(self, turn: Turn, program: Program, backend_id: BackendId, at_s: float) -> None:
        """A call was answered: how long programs take from answer to answer, by how many there are."""
        if self._has_own_gate and not turn.is_side and program.is_resident and program.backend_id == backend_id:
            n_programs, cycle_s = self.books.n_programs(backend_id), at_s - program.answered_at_s - turn.wait_s
            self._pace(backend_id).read(n_programs=n_programs, cycle_s=max(cycle_s, 0.0), at_s=at_s)

    def _pace(self, backend_id: BackendId) -> Pace:
        return self.books.pace_by_backend.setdefault(backend_id, Pace())

    def _stir_pool(self, model_id: ModelId) -> None:
        """Something about a model has changed that may let in a held turn, of it or of those that share its caches."""
        for backend_id in self._backends.all_of(model_id):
            for member in self.ledger.members(backend_id):
                self._backends.stir(BackendId(member))
        self._backends.roomy[model_id] = None

    def hold(self, turn: Turn, program: Program, at_s: float) -> None:
        """Put the turn behind all others of its model, or, where its program was paused, behind those of such."""
        assert turn.model is not None
        turn.is_held = self.is_stirred = True
        turn.is_paused = program.is_paused and not turn.is_side
        if program.admitted_at_s is None and not turn.is_side:
            turn.joined_at_s = at_s
            self.demand_by_model[turn.model].learn_held(turn.needed_tokens)
        order = self.order_by_model[turn.model]
        order.push(turn.turn_id, standing(turn, program))
        self.n_held += 1
        if turn.is_paused and len(order) > 1:
            self._backends.roomy[turn.model] = None  # it may be the head now, and fit where the one before does not

    def unhold(self, turn: Turn, at_s: float, *, is_served: bool = False) -> None:
        """Take the turn out of its order; whoever is head now may be smaller, and whoever is left may be alone."""
        assert turn.model is not None
        turn.is_held = False
        if turn.joined_at_s is not None:
            self.demand_by_model[turn.model].learn_wait(at_s - turn.joined_at_s, is_served=is_served)
            turn.joined_at_s = None
        self.order_by_model[turn.model].remove(turn.turn_id, is_served=is_served)
        self.n_held -= 1
        if self._config.admission.reserves:
            self._stir_pool(turn.model)
        else:
            self._backends.roomy[turn.model] = None

    def head(self, model_id: ModelId, at_s: float) -> TurnId | None:
        """The turn that is next for a model, or None."""
        order = self.order_by_model[model_id]
        return order.head(at_s, self.demand_by_model[model_id].expected_run_s) if len(order) else None

    # --- what readings tell ---

    def read(self, backend_id: BackendId, at_s: float) -> None:
        """A reading has come: learn what requests hold besides their tokens, and how much the engine holds."""
        state, admission = self._backends.by_id[backend_id], self._config.admission
        account, overhead = self.ledger.account_by_backend[backend_id], self.books.overhead_by_backend[backend_id]
        max_age_s = self._config.signal_max_age_s
        usage = self._backends.signal(backend_id, "kv_usage_ratio", at_s, max_age_s)
        is_ours = not state.load.n_others
        learns = (admission.learns_overhead or admission.capacity == "calibrated") and account.pool is None
        before = (overhead.tokens, account.capacity)
        if usage is not None and is_ours and learns and self.is_gated(backend_id):
            overhead.read(
                kv_usage_ratio=usage,
                n_running=state.load.n_calls,
                tokens=state.load.kv_tokens_then,
                capacity=account.capacity,
                n_preemptions=self._backends.signal(backend_id, "n_preemptions", at_s, max_age_s),
            )
        if admission.capacity == "calibrated":
            found = overhead.calibrated()
            if found is not None and self.is_gated(backend_id):
                account.capacity = found[0]
        elif admission.capacity == "engine" and not state.spec.declares_capacity:
            self._take_capacity(backend_id, self._backends.signal(backend_id, "kv_tokens", at_s, max_age_s))
        if account.capacity != before[1]:
            self.stir(backend_id)
        elif overhead.tokens != before[0]:
            self._stir_calmly(backend_id)

    def _take_capacity(self, backend_id: BackendId, kv_tokens: float | None) -> None:
        """Count in the engine's own KV tokens, also what is held there in another unit."""
        account = self.ledger.account_by_backend[backend_id]
        if kv_tokens is None or not 1.0 <= kv_tokens <= CAPACITY_MAX:
            return
        if account.unit is CapacityUnit.KV_TOKENS and account.capacity == int(kv_tokens):
            return
        if account.unit is CapacityUnit.KV_TOKENS:
            self.ledger.add(backend_id, CapacityUnit.KV_TOKENS, int(kv_tokens))
        else:
            amounts = {key: self._tokens_of(key, backend_id) for key in account.amount_by_key}
            self.ledger.recount(backend_id, CapacityUnit.KV_TOKENS, int(kv_tokens), amounts)
        self.stir(backend_id)

    def _tokens_of(self, key: str, backend_id: BackendId) -> int:
        """What a program or a turn that has a place there would have reserved of KV tokens."""
        program = self.books.programs.get(ProgramId(key))
        turn_ids = [TurnId(int(key.removeprefix(TURN_KEY_PREFIX)))] if program is None else program.open_turns
        tokens = max((self.turns[t].needed_tokens for t in turn_ids if t in self.turns), default=0)
        if program is not None:
            expected_tokens = self.demand_by_model[self.books.model_by_backend[backend_id]].expected_tokens
            tokens = max(tokens, program.tokens, expected_tokens) + self.books.overhead_tokens(backend_id)
        return tokens

    # --- laws ---

    def check(self, programs: Mapping[ProgramId, Program], turns: Mapping[TurnId, Turn], at_s: float) -> None:
        """Laws L4, L5 and L9 as far as admission answers for them."""
        self.ledger.check()
        for backend_id, account in self.ledger.account_by_backend.items():
            for key in account.amount_by_key:
                self._check_owner(key, backend_id, programs, turns)
        for program in programs.values():
            if program.is_reserved and not self.ledger.holds(program.program_id, str(program.backend_id)):
                raise LawBroken("L5", f"program {program.program_id!r} believes in a reservation that is not there")
        for turn in turns.values():
            if turn.backend_id is not None:
                self._check_cover(turn, programs[turn.program_id])
        for model_id, order in self.order_by_model.items():
            head = self.head(model_id, at_s)
            if model_id in self._backends.roomy:
                continue  # just loaded under another pool file: the next event looks at it first
            if head is not None and self.fits(turns[head], programs[turns[head].program_id], at_s):
                raise LawBroken("L9", f"turn {head} is held for {model_id!r} although it fits")
            for turn_id in order:
                turn, program = turns[turn_id], programs[turns[turn_id].program_id]
                if self.may_stay(turn, program, at_s) and self.may_call(turn, program):
                    raise LawBroken("L9", f"turn {turn_id} is held although its program has its place on {model_id!r}")
        n_held = sum(len(order) for order in self.order_by_model.values())
        if not self.n_held == n_held == sum(turn.is_held for turn in turns.values()):
            raise LawBroken("L15", f"{self.n_held} turns counted as held, {n_held} in order")

    def _check_owner(
        self, key: str, backend_id: str, programs: Mapping[ProgramId, Program], turns: Mapping[TurnId, Turn]
    ) -> None:
        program = programs.get(ProgramId(key))
        if program is not None and program.is_reserved and program.backend_id == backend_id:
            return
        number = key.removeprefix(TURN_KEY_PREFIX)
        turn = turns.get(TurnId(int(number))) if number != key else None
        if turn is None or not turn.has_own_reservation or turn.backend_id != backend_id:
            raise LawBroken("L5", f"reservation {key!r} on {backend_id!r} belongs to nobody")

    def _check_cover(self, turn: Turn, program: Program) -> None:
        if turn.has_own_reservation and self.ledger.holds(turn.key, str(turn.backend_id)):
            return
        if program.is_reserved and program.backend_id == turn.backend_id and not turn.is_side:
            account = self.ledger.account_by_backend[str(turn.backend_id)]
            amount = account.amount_by_key[program.program_id] + account.common
            if account.unit is not CapacityUnit.KV_TOKENS or amount >= turn.needed_tokens:
                return
            raise LawBroken("L5", f"turn {turn.turn_id} needs {turn.needed_tokens} tokens under {amount} reserved")
        raise LawBroken("L5", f"turn {turn.turn_id} runs on {turn.backend_id!r} without a reservation")
