"""When a program may start on a backend: five rules behind one question.

A gate is asked about backends counted in KV tokens only; slots and requests per minute are hard limits that the ledger
holds under every gate. It looks and never changes anything. What it lets in is reserved in the ledger all the same, so
that every dispatch is covered (law L5); beyond the ledger's own limit then only the gate stands.
"""

from collections.abc import Mapping, Sized
from typing import Protocol

import numpy as np

from loadwise.kernel.ids import BackendId, ModelId, ProgramId
from loadwise.ledger.demand import PSEUDO_OBSERVATIONS, Demand
from loadwise.ledger.footprint import HORIZON_STEPS, Floats, projected
from loadwise.ledger.ledger import Ledger
from loadwise.ledger.overhead import Overhead

from .config import AdmissionConfig
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
        self.model_by_backend: dict[BackendId, ModelId] = {}
        self.programs: Mapping[ProgramId, Program] = {}
        self.order_by_model: Mapping[ModelId, Sized] = {}

    def overhead_tokens(self, backend_id: BackendId) -> int:
        """What a running request holds there besides its tokens."""
        overhead = self.overhead_by_backend.get(backend_id)
        return 0 if overhead is None else overhead.tokens

    def extra_tokens(self, backend_id: BackendId, n_programs: int) -> float:
        """What so many programs hold besides their contexts, less what they have in common."""
        common = self.ledger.account_by_backend[backend_id].common
        return float(n_programs * self.overhead_tokens(backend_id) - max(n_programs - 1, 0) * common)

    def contexts(self, backend_id: BackendId) -> list[float]:
        """Tokens of every program that has a place there, and of single turns."""
        amounts = self.ledger.account_by_backend[backend_id].amount_by_key
        found = ((self.programs.get(ProgramId(key)), amount) for key, amount in amounts.items())
        return [float(amount if program is None else program.tokens) for program, amount in found]


class LedgerGate:
    """A peak is reserved for each program, up to a share of the capacity (ORACLE, B.2)."""

    def __init__(self, books: Books) -> None:
        self._ledger = books.ledger

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        return self._ledger.fits(backend_id, amount, at_s=at_s)


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
    of largest ones (`ledger.footprint`). Every program also counts what a running request holds besides its tokens.
    """

    def __init__(self, config: AdmissionConfig, books: Books) -> None:
        self._config = config
        self._books = books

    def admits(self, turn: Turn, program: Program, backend_id: BackendId, amount: int, at_s: float) -> bool:
        ledger = self._books.ledger
        members = ledger.members(backend_id)
        if not any(ledger.account_by_backend[b].amount_by_key for b in members):
            return True
        if self._is_unproven(backend_id) and not ledger.fits(backend_id, amount, at_s=at_s):
            return False
        new_tokens = float(max(program.context_tokens, turn.needed_tokens))
        if self._largest(backend_id, members, [new_tokens]) <= self._config.footprint_ratio:
            return True
        # Nobody need wait where all who do would fit with what is kept in hand for a crowd.
        model_id = self._books.model_by_backend[backend_id]
        n_waiting = len(self._books.order_by_model[model_id]) - (turn.is_held and turn.model == model_id)
        everybody = [new_tokens] * (1 + n_waiting)
        return self._largest(backend_id, members, everybody) <= self._config.footprint_slack_ratio

    def bound_ratio(self, backend_id: BackendId) -> float:
        """Share of the capacity that all programs may be expected to fill at once."""
        return self._config.footprint_ratio

    def n_missing(self, backend_id: BackendId) -> float:
        """How many average programs must leave before one begins; contexts may have outgrown what departures free."""
        members = self._books.ledger.members(backend_id)
        n_programs = sum(len(self._books.ledger.account_by_backend[b].amount_by_key) for b in members)
        now = self._largest(backend_id, members, [])
        over = self._largest(backend_id, members, [0.0]) - self._config.footprint_ratio
        return over * n_programs / now if now > 0.0 else 0.0

    def _largest(self, backend_id: BackendId, members: list[str], newcomers: list[float]) -> float:
        """Largest expected share of the cache, with some more programs on one backend."""
        shares = np.zeros(HORIZON_STEPS)
        for member in members:
            contexts = self._books.contexts(BackendId(member))
            shares += self._shares(BackendId(member), contexts + newcomers if member == backend_id else contexts)
        return float(shares.max())

    def _is_unproven(self, backend_id: BackendId) -> bool:
        """Whether fewer programs have ended than the prior is worth: until then a peak each must fit as well.

        A pool that is found idle by a crowd would else be filled by guesswork, with programs that all grow in step.
        """
        demand = self._books.demand_by_model[self._books.model_by_backend[backend_id]]
        return demand.n_finished < PSEUDO_OBSERVATIONS

    def _shares(self, backend_id: BackendId, contexts: list[float]) -> Floats:
        """Expected use of the cache by one backend's programs, over the horizon."""
        account = self._books.ledger.account_by_backend[backend_id]
        peaks = self._books.demand_by_model[self._books.model_by_backend[backend_id]].peaks
        extra = self._books.extra_tokens(backend_id, len(contexts))
        shares: Floats = (projected(contexts, peaks) + extra) / account.capacity
        return shares


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
