"""Which backend a turn runs on, and whether it may start now: reservations, holds, replicas.

A program reserves on one backend for as long as it lives (KV tokens, slots). Turns on backends counted in requests per
minute, and *side turns* (pinned to another model than their program's), are covered one by one instead. Turns that do
not fit are held per model in the order of arrival; a model's head may take any of its backends.
"""

from collections.abc import Mapping

import numpy as np

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import BackendId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import BackendSpec, CapacityUnit
from loadwise.kernel.streams import Streams
from loadwise.ledger.demand import Demand
from loadwise.ledger.ledger import Ledger
from loadwise.policy.base import Candidate, Context, Policy
from loadwise.policy.guarded import Report, guarded
from loadwise.policy.registry import Resolve, make_policy

from .backends import Backends
from .config import RouterConfig
from .order import FifoOrder
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
        self.demand_by_model: dict[ModelId, Demand] = {}
        self.order_by_model: dict[ModelId, FifoOrder] = {}
        self.n_held = 0
        for model_id in backends.model_by_id:
            self.add_model(model_id)
        for state in backends.by_id.values():
            self.add_backend(state.spec)

    def add_model(self, model_id: ModelId) -> None:
        """A model joined the pool."""
        self.demand_by_model.setdefault(model_id, Demand(prior_tokens=self._config.expected_tokens))
        self.order_by_model.setdefault(model_id, FifoOrder())

    def add_backend(self, spec: BackendSpec) -> None:
        """A backend joined the pool, or its capacity changed."""
        unit, capacity = spec.capacity
        self.ledger.add(spec.name, unit, capacity)

    # --- may it start? ---

    def admit(self, turn: Turn, program: Program, at_s: float) -> BackendId | None:
        """Cover the turn by a reservation and say where it runs, or change nothing and say None."""
        if self.may_stay(turn, program, at_s):
            self._grow(program, turn)
            return program.backend_id
        for backend_id in self._replicas(turn, program, at_s):
            if self._reserve(turn, program, backend_id, at_s):
                return backend_id
        return None

    def fits(self, turn: Turn, program: Program, at_s: float) -> bool:
        """Whether `admit` would admit the turn now; changes nothing."""
        if self.may_stay(turn, program, at_s):
            return True
        return any(
            self._is_at_home(turn, program, b) or self.ledger.fits(b, self._amount(turn, program, b), at_s=at_s)
            for b in self._replicas(turn, program, at_s)
        )

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
            self._grow(program, turn)
            return True
        is_leaving = program.is_reserved and not turn.is_side and program.n_covered == 0
        is_bound_elsewhere = program.is_reserved and not is_leaving
        is_counted = self.ledger.unit(backend_id) is CapacityUnit.REQUESTS_PER_MINUTE
        is_own = turn.is_side or is_bound_elsewhere or is_counted
        key = turn.key if is_own else program.program_id
        if not self.ledger.reserve(key, backend_id, self._amount(turn, program, backend_id), at_s=at_s):
            return False
        self.replica_policy.observe(turn.turn_id, backend_id, _NO_CONTEXT)
        if is_leaving:
            self.release_program(program)
        if is_own:
            turn.has_own_reservation = True
        else:
            program.is_reserved = True
        if not turn.is_side and not is_bound_elsewhere:
            program.backend_id = backend_id
        return True

    def _amount(self, turn: Turn, program: Program, backend_id: BackendId) -> int:
        """What covers the turn: reserve(p) = max(tokens of p, expected tokens of its model) (ORACLE, B.2).

        The tokens of p are those of its context as last counted, or of the prompt at hand with what it may answer.
        """
        if self.ledger.unit(backend_id) is not CapacityUnit.KV_TOKENS:
            return 1
        if turn.is_side:
            return turn.needed_tokens
        assert turn.model is not None
        return max(program.context_tokens, turn.needed_tokens, self.demand_by_model[turn.model].expected_tokens)

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
            first = program.backend_id
        else:
            candidates = [self.replica(b, at_s) for b in usable]
            rng = self._streams.at("replica", turn.turn_id)
            context = Context(decision_id=turn.turn_id, x=_NO_CONTEXT, at_s=at_s)
            first = usable[self.replica_policy.choose(context, candidates, rng).chosen]
        rest = [b for b in usable if b != first]
        rest.sort(key=lambda b: -self.ledger.headroom_ratio(b, at_s=at_s))
        return [first, *rest]

    def replica(self, backend_id: BackendId, at_s: float) -> Candidate:
        """A backend as a candidate of the replica policy."""
        state = self._backends.by_id[backend_id]
        return Candidate(
            name=backend_id,
            n_running=state.n_running,
            headroom_ratio=self.ledger.headroom_ratio(backend_id, at_s=at_s),
        )

    # --- what is held back, and given back ---

    def _grow(self, program: Program, turn: Turn) -> None:
        """Let the program's reservation grow to what a turn needs; it may pass the limit, and then admission stops."""
        backend_id = program.backend_id
        assert backend_id is not None
        account = self.ledger.account_by_backend[backend_id]
        if account.unit is CapacityUnit.KV_TOKENS and turn.needed_tokens > account.amount_by_key[program.program_id]:
            self.ledger.extend(program.program_id, backend_id, turn.needed_tokens)

    def follow(self, program: Program, running_tokens: int) -> None:
        """Let the reservation of a program follow its context, and what runs under it."""
        assert program.model is not None and program.backend_id is not None
        if self.ledger.unit(program.backend_id) is not CapacityUnit.KV_TOKENS:
            return
        expected_tokens = self.demand_by_model[program.model].expected_tokens
        amount = max(program.context_tokens, expected_tokens, running_tokens)
        if self.ledger.extend(program.program_id, program.backend_id, amount) < 0:
            self._backends.stir(program.backend_id)

    def release_program(self, program: Program) -> None:
        """Give the program's reservation back, if it has one; its binding to the backend stays as a preference."""
        if program.is_reserved:
            assert program.backend_id is not None
            self.ledger.release(program.program_id, program.backend_id)
            program.is_reserved = False
            self._backends.stir(program.backend_id)

    def release_turn(self, turn: Turn) -> None:
        """Give the turn's own reservation back."""
        assert turn.backend_id is not None
        self.ledger.release(turn.key, turn.backend_id)
        turn.has_own_reservation = False
        self._backends.stir(turn.backend_id)

    def learn_demand(self, model_id: ModelId, peak_tokens: int) -> None:
        """A program of the model has ended; where the estimate falls, a held turn may fit."""
        self.demand_by_model[model_id].learn(peak_tokens)
        self._backends.roomy[model_id] = None

    def hold(self, turn: Turn) -> None:
        """Put the turn behind all others of its model."""
        assert turn.model is not None
        turn.is_held = True
        self.order_by_model[turn.model].push(turn.turn_id)
        self.n_held += 1

    def unhold(self, turn: Turn) -> None:
        """Take the turn out of its order; whoever is head now may be smaller."""
        assert turn.model is not None
        turn.is_held = False
        self.order_by_model[turn.model].remove(turn.turn_id)
        self.n_held -= 1
        self._backends.roomy[turn.model] = None

    def head(self, model_id: ModelId) -> TurnId | None:
        """The turn that is next for a model, or None."""
        return self.order_by_model[model_id].head

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
            head = order.head
            if model_id in self._backends.roomy:
                continue  # just loaded under another pool file: the next event looks at it first
            if head is not None and self.fits(turns[head], programs[turns[head].program_id], at_s):
                raise LawBroken("L9", f"turn {head} is held for {model_id!r} although it fits")
            for turn_id in order:
                if self.may_stay(turns[turn_id], programs[turns[turn_id].program_id], at_s):
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
            amount = account.amount_by_key[program.program_id]
            if account.unit is not CapacityUnit.KV_TOKENS or amount >= turn.needed_tokens:
                return
            raise LawBroken("L5", f"turn {turn.turn_id} needs {turn.needed_tokens} tokens under {amount} reserved")
        raise LawBroken("L5", f"turn {turn.turn_id} runs on {turn.backend_id!r} without a reservation")
