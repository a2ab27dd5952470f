"""When a program may start on a backend: five rules behind one question.

A gate is asked about backends counted in KV tokens only; slots and requests per minute are hard limits that the ledger
holds under every gate. It looks and never changes anything. What it lets in is reserved in the ledger all the same, so
that every dispatch is covered (law L5); beyond the ledger's own limit then only the gate stands.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from loadwise.kernel.ids import BackendId, ModelId, ProgramId
from loadwise.ledger.demand import Demand
from loadwise.ledger.footprint import HORIZON_STEPS, projected
from loadwise.ledger.ledger import Ledger
from loadwise.ledger.overhead import Overhead
from loadwise.ledger.pace import Pace
from loadwise.ledger.residency import Residency

from .config import AdmissionConfig
from .order import Order
from .program import Program, Turn


class Gate(Protocol):
    """Whether a program may start somewhere now."""

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        """Whether the turn may have a place of `amount` tokens there."""
        ...


class Books:
    """What gates look at: promises, demands, overheads, programs. Filled in by `Admission`, which owns them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.demand_by_model: dict[ModelId, Demand] = {}
        self.overhead_by_backend: dict[BackendId, Overhead] = {}
        self.residency_by_cache: dict[str, Residency] = {}
        """By the name of a cache that backends share, or of the one backend that has it."""
        self.pace_by_backend: dict[BackendId, Pace] = {}
        self.model_by_backend: dict[BackendId, ModelId] = {}
        self.programs: Mapping[ProgramId, Program] = {}
        self.order_by_model: Mapping[ModelId, Order] = {}

    def overhead_tokens(self, backend_id: BackendId) -> int:
        """What a running request holds there besides its tokens."""
        overhead = self.overhead_by_backend.get(backend_id)
        return 0 if overhead is None else overhead.tokens

    def cache(self, backend_id: BackendId) -> str:
        """Under which name the residency of a backend's cache is kept; pools and backends may be called alike."""
        pool = self.ledger.account_by_backend[backend_id].pool
        return f"backend:{backend_id}" if pool is None else f"pool:{pool}"

    def fill_ratio(self, backend_id: BackendId) -> float:
        """Share of the cache that living contexts fill, with what running requests hold besides, as far as is known."""
        total = 0.0
        for member in map(BackendId, self.ledger.members(backend_id)):
            account = self.ledger.account_by_backend[member]
            contexts = self.contexts(member)
            total += (sum(contexts) + self.extra_tokens(member, len(contexts))) / account.capacity
        return total

    def has_others_held(self, program: Program, backend_id: BackendId) -> bool:
        """Whether turns of others wait for a model that uses the backend's cache."""
        models = {self.model_by_backend[BackendId(member)] for member in self.ledger.members(backend_id)}
        orders = [self.order_by_model[m] for m in models]
        n_own = sum(turn_id in order for order in orders for turn_id in program.open_turns)
        return sum(len(order) for order in orders) > n_own

    def extra_tokens(self, backend_id: BackendId, n_programs: int) -> float:
        """What so many programs hold besides their contexts, less what they have in common.

        The overhead counts twice: what a request holds besides its tokens it leaves behind when its next turn has made
        it anew, and least recently used, that goes only after contexts of programs that are between two calls.
        """
        common = self.ledger.account_by_backend[backend_id].common
        return 2.0 * n_programs * self.overhead_tokens(backend_id) - max(n_programs - 1, 0) * common

    def n_programs(self, backend_id: BackendId) -> int:
        """How many have a place in its cache, single turns included."""
        return sum(len(self.ledger.account_by_backend[b].amount_by_key) for b in self.ledger.members(backend_id))

    def latest(self, backend_id: BackendId) -> list[tuple[Program, float]]:
        """Started programs that have a place in its cache, who came last first, and what share of it each fills."""
        found: list[tuple[Program, float]] = []
        for member in map(BackendId, self.ledger.members(backend_id)):
            account, extra_tokens = self.ledger.account_by_backend[member], self.extra_tokens(member, 1)
            programs = (self.programs.get(ProgramId(key)) for key in account.amount_by_key)
            found += [(p, (p.tokens + extra_tokens) / account.capacity) for p in programs if p is not None]
        return sorted(found, key=lambda entry: -_admitted_at_s(entry[0]))

    def contexts(self, backend_id: BackendId) -> list[float]:
        """Tokens of every program that has a place there, and of single turns."""
        amounts = self.ledger.account_by_backend[backend_id].amount_by_key
        found = ((self.programs.get(ProgramId(key)), amount) for key, amount in amounts.items())
        return [float(amount if program is None else program.tokens) for program, amount in found]


def _admitted_at_s(program: Program) -> float:
    return math.inf if program.admitted_at_s is None else program.admitted_at_s


class LedgerGate:
    """A peak is reserved for each program, up to a share of the capacity (ORACLE, B.2)."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        return self._books.ledger.fits(backend_id, amount, at_s=at_s)


class OpenGate:
    """Nobody waits: the engine alone."""

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        return True


class CapGate:
    """So many programs on a backend, whatever their size."""

    def __init__(self, config: AdmissionConfig, books: Books) -> None:
        self._config = config
        self._books = books

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        cap = self._config.programs_max_by_model.get(
            self._books.model_by_backend[backend_id], self._config.programs_max
        )
        return len(self._books.ledger.account_by_backend[backend_id].amount_by_key) < cap


class FootprintGate:
    """All programs together must fit at their largest, as far as that can be expected.

    Their contexts grow together while some end: what is held against the limit is the largest expected sum, not a sum
    of largest ones (`ledger.footprint`). The limit is the fill at which contexts begin to be lost, which answers tell
    (`ledger.residency`); while they are lost, nobody is let in.

    Where it reserves, a peak for each must fit besides, as under the ledger's own rule, while others wait: fewer run,
    each is faster, and fewer run out of time. Who waits alone would only lose by it.
    """

    def __init__(self, config: AdmissionConfig, books: Books) -> None:
        self._config = config
        self._books = books

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        ledger = self._books.ledger
        members = ledger.members(backend_id)
        if not self._books.n_programs(backend_id):
            return True
        if not self._keeps(turn, program, backend_id):
            return False
        if program.is_paused:
            return True  # what it will come to was weighed when it was let in
        has_peak = not self._config.reserves or ledger.fits(backend_id, amount, at_s=at_s)
        if not has_peak and self._books.has_others_held(program, backend_id):
            return False
        new_tokens = float(max(program.context_tokens, turn.needed_tokens))
        if self._largest(backend_id, members, [new_tokens]) > self.bound_ratio(backend_id):
            return False
        return not self._config.heeds_budget or self._is_worth_it(program, backend_id, members)

    def _keeps(self, turn: Turn, program: Program, backend_id: BackendId) -> bool:
        """Whether the contexts of all stay in the cache with one more program, as far as has been learned."""
        books = self._books
        fill_ratio = books.fill_ratio(backend_id)
        residency = books.residency_by_cache.get(books.cache(backend_id))
        if residency is not None and not residency.lets_in(fill_ratio):
            return False
        bound = self.bound_ratio(backend_id)
        tokens = max(program.context_tokens, turn.needed_tokens)
        own_ratio = tokens / books.ledger.account_by_backend[backend_id].capacity
        if program.is_paused:  # it will be one that returns; a huge one must be able to beside small ones
            own_ratio = max(own_ratio, min(2.0 * own_ratio, bound / 2.0))
        return fill_ratio + self._returning_ratio(backend_id) + own_ratio <= bound

    def _returning_ratio(self, backend_id: BackendId) -> float:
        """Share of the cache that fills once more for a while, with contexts of programs that were away.

        Engines with checkpoints of state leave one for every piece of what they read anew: if all came back at once,
        the cache would thrash again.
        """
        total = 0.0
        for member in map(BackendId, self._books.ledger.members(backend_id)):
            account = self._books.ledger.account_by_backend[member]
            found = (self._books.programs.get(ProgramId(key)) for key in account.amount_by_key)
            total += sum(p.context_tokens for p in found if p is not None and not p.is_resident) / account.capacity
        return total

    def _is_worth_it(self, program: Program, backend_id: BackendId, members: list[str]) -> bool:
        """Whether one more there does not make more programs run out of time than it is worth (`ledger.pace`)."""
        pace, budget_s = self._books.pace_by_backend.get(backend_id), program.budget_s
        if budget_s is None and program.budget_ends_at_s is not None:
            budget_s = program.budget_ends_at_s - program.arrived_at_s  # not what is left: time alone opens no gate
        if pace is None or budget_s is None or budget_s <= 0.0 or not pace.is_known:
            return True
        accounts, programs = self._books.ledger.account_by_backend, self._books.programs
        if not accounts[backend_id].amount_by_key:
            return True  # others use its cache, but nobody is there from whose answers a new pace could be learned
        n_programs = self._books.n_programs(backend_id)
        here = (programs.get(ProgramId(key)) for key in accounts[backend_id].amount_by_key)
        running = [float(found.n_turns - found.n_turns_before) for found in here if found is not None]
        return pace.is_worth_one_more(n_programs, running, budget_s)

    def bound_ratio(self, backend_id: BackendId) -> float:
        """Share of the cache that living contexts may fill, as it was learned, or as it begins."""
        residency = self._books.residency_by_cache.get(self._books.cache(backend_id))
        return self._config.footprint_ratio if residency is None else residency.bound_ratio

    def n_missing(self, backend_id: BackendId) -> float:
        """How many average programs must leave before one begins; contexts may have outgrown what departures free."""
        members, n_programs = self._books.ledger.members(backend_id), self._books.n_programs(backend_id)
        now = self._largest(backend_id, members, [])
        most = self._largest(backend_id, members, [0.0])
        over = most - self.bound_ratio(backend_id)
        return over * n_programs / now if now > 0.0 else 0.0

    def _largest(self, backend_id: BackendId, members: list[str], newcomers: list[float]) -> float:
        """Largest expected share of the cache, with some more programs on one backend."""
        shares = np.zeros(HORIZON_STEPS)
        for member in map(BackendId, members):
            contexts = self._books.contexts(member) + (newcomers if member == backend_id else [])
            capacity = self._books.ledger.account_by_backend[member].capacity
            peaks = self._books.demand_by_model[self._books.model_by_backend[member]].peaks
            pace = self._books.pace_by_backend.get(member)
            sums = projected(contexts, peaks, () if pace is None else pace.cut_tokens)
            shares += (sums + self._books.extra_tokens(member, len(contexts))) / capacity
        return float(shares.max())


class PauseGate:
    """ThunderAgent: who is new starts where there is room and nobody waits; all others when a tick resumes them."""

    def __init__(self, config: AdmissionConfig, books: Books) -> None:
        self._pause = config.pause
        self._learns_overhead = config.learns_overhead
        self._books = books
        self.resumed: dict[ProgramId, BackendId] = {}
        """By the tick at hand."""

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        if turn.is_side:
            return True
        if turn.is_held or program.admitted_at_s is not None:
            return self.resumed.get(program.program_id) == backend_id
        return self.room_tokens(backend_id) >= turn.needed_tokens + self._pause.buffer_tokens

    def room_tokens(self, backend_id: BackendId, decays_at_s: float | None = None) -> float:
        """Capacity that the proxy believes to be left.

        Args:
            decays_at_s: where given, programs between two calls count less the longer their answer is ago.
        """
        pause, account = self._pause, self._books.ledger.account_by_backend[backend_id]
        learned_tokens = self._books.overhead_tokens(backend_id) if self._learns_overhead else 0
        state_tokens = pause.state_tokens + learned_tokens
        used = 0.0
        for key, amount in account.amount_by_key.items():
            program = self._books.programs.get(ProgramId(key))
            used += pause.buffer_tokens
            if program is None:
                used += amount + state_tokens
            elif program.n_covered:
                used += program.tokens + state_tokens
            elif decays_at_s is not None and pause.has_decay:
                used += program.tokens * 2.0 ** -min(max(decays_at_s - program.active_at_s, 0.0), 60.0)
            else:
                used += pause.acting_weight * program.tokens
        return account.capacity * (1.0 - pause.headroom_ratio) - used


def make_gate(config: AdmissionConfig, books: Books) -> Gate:
    """The configured gate."""
    if config.kind == "footprint":
        return FootprintGate(config, books)
    if config.kind == "cap":
        return CapGate(config, books)
    if config.kind == "pause":
        return PauseGate(config, books)
    return OpenGate() if config.kind == "none" else LedgerGate(books)
