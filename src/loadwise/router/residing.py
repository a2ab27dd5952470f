"""Whether programs' contexts stay in their caches, and who gives way where they do not.

Under the gate `footprint` every answer says how much of its program's context was found (`ledger.residency`). While a
cache thrashes, programs are paused: their next turns are held, before all that are new, until the gate lets them in
again. Who came last goes first: it has least to read anew and most of its budget left. One program always goes on.
"""

from loadwise.kernel.ids import BackendId
from loadwise.kernel.pool import BackendHealth
from loadwise.ledger.residency import LOST_BELOW, Residency

from .admission import Admission
from .backends import Backends
from .config import AdmissionConfig
from .program import Program

EXCUSED_MAX = 4
"""Answers in a row of one program that are not learned from, for its engine seems to have been started again. It may
fail a few times before it stays; one that is said to do so before every answer only flaps, and its cache may thrash."""


class Residing:
    """Learns from answers to later turns of programs, and pauses."""

    def __init__(self, config: AdmissionConfig, backends: Backends, admission: Admission) -> None:
        self._config = config
        self._backends = backends
        self._admission = admission
        self._books = admission.books
        self.is_on = config.kind == "footprint" and config.learns_footprint

    def learn(
        self, program: Program, backend_id: BackendId, prompt_tokens: int, cached_tokens: int, tokens_after: int
    ) -> int:
        """A later call was answered: whether its program's context was found tells whether the cache was too full.

        Args:
            tokens_after: the context with the answer.

        Returns:
            How many programs were paused.
        """
        context_tokens, filled_ratio = program.context_tokens, program.fill_ratio
        program.fill_ratio = 0.0
        if not self.is_on or not program.is_resident or program.backend_id != backend_id:
            return 0
        program.n_excused = 0
        if not self._admission.is_gated(backend_id) or not 0 < context_tokens <= prompt_tokens:
            return 0  # a conversation that was made shorter, or began anew
        found_ratio = min(cached_tokens / context_tokens, 1.0)
        program.has_found |= found_ratio >= LOST_BELOW
        if not program.has_found:
            return 0
        residency, fill_ratio = self._residency(backend_id), self._books.fill_ratio(backend_id)
        program.fill_ratio = fill_ratio
        capacity = self._books.ledger.account_by_backend[backend_id].capacity
        residency.read(
            fill_ratio=max(fill_ratio, filled_ratio),  # what was lost was so at some time since the last answer
            found_ratio=found_ratio,
            n_programs=self._books.n_programs(backend_id),
            grown_ratio=max(tokens_after - context_tokens, 0) / capacity,
        )
        return self._pause(backend_id, residency.surplus_ratio(fill_ratio))

    def forget(self, backend_id: BackendId) -> None:
        """The engine could not be reached, or counts from zero: what it finds next says nothing of a full cache.

        Whoever lived there counts as one that returns, until its context has been read anew.
        """
        for program in self._books.programs.values():
            if program.backend_id == backend_id and program.is_resident and program.n_excused < EXCUSED_MAX:
                program.n_excused += 1
                program.is_resident, program.fill_ratio = False, 0.0

    def _residency(self, backend_id: BackendId) -> Residency:
        cache = self._books.cache(backend_id)
        known = self._books.residency_by_cache.get(cache)
        if known is None:
            known = Residency(bound_ratio=self._config.footprint_ratio)
            self._books.residency_by_cache[cache] = known
        return known

    def _pause(self, backend_id: BackendId, surplus_ratio: float) -> int:
        """Take the places of programs until so much of the cache is free, now or as soon as their calls return."""
        n_paused = 0
        for program, share in self._books.latest(backend_id)[:-1] if surplus_ratio > 0.0 else []:
            if surplus_ratio <= 0.0:
                break
            if self._is_draining(program):
                continue  # it could not come back
            surplus_ratio -= share
            if program.is_marked:
                continue
            n_paused += 1
            program.is_paused = True
            if program.n_covered:
                program.is_marked = True
            else:
                self._admission.release_program(program)
        return n_paused

    def _is_draining(self, program: Program) -> bool:
        """Whether its backend keeps who has a place there and takes nobody else."""
        assert program.backend_id is not None
        return self._backends.by_id[program.backend_id].health is BackendHealth.DRAINING
