"""The pool changes: backends join, leave, fall silent, recover; signals come in."""

from loadwise.kernel import events as e
from loadwise.kernel.ids import BackendId, ModelId
from loadwise.kernel.pool import BackendHealth, BackendSpec, ModelSpec
from loadwise.kernel.work import TurnOutcome

from .config import MODELS_MAX as MODELS_MAX
from .desk import Desk
from .ending import Ending
from .failure import Failure
from .load import OwnLoad

BACKENDS_MAX = 4096


class PoolChanges:
    """Keeps backends, ledger and held turns in step."""

    def __init__(self, desk: Desk, ending: Ending) -> None:
        self._desk = desk
        self._ending = ending

    def signals_observed(self, event: e.SignalsObserved) -> None:
        """A reading; what is not a number, or comes from the future, is left out."""
        desk = self._desk
        if event.backend_id not in desk.backends.by_id:
            desk.counts.stale += 1
            return
        if desk.backends.has_begun_anew(event.backend_id, event.values, event.observed_at_s, desk.now_s):
            desk.residing.forget(event.backend_id)
        n_refused = desk.backends.observe(event.backend_id, event.values, event.observed_at_s, desk.now_s)
        desk.counts.malformed += n_refused
        desk.admission.read(event.backend_id, desk.now_s)

    def backend_added(self, event: e.BackendAdded) -> None:
        """A backend joins, or a known one is described anew."""
        if not self._has_room(event):
            self._desk.counts.malformed += 1
            return
        model_id = ModelId(event.backend.model)
        if event.model is not None:
            self.add_model(model_id, event.model)
        self.add(event.backend)

    def _has_room(self, event: e.BackendAdded) -> bool:
        backends = self._desk.backends
        if event.backend.name not in backends.by_id and len(backends.by_id) >= BACKENDS_MAX:
            return False
        if event.backend.model in backends.model_by_id:
            return True
        return event.model is not None and len(backends.model_by_id) < MODELS_MAX

    def add_model(self, model_id: ModelId, model: ModelSpec) -> None:
        """A model joins, or is described anew."""
        self._desk.backends.add_model(model_id, model)
        self._desk.admission.add_model(model_id)

    def follow_file(self, specs: list[BackendSpec]) -> None:
        """Make the pool what its file says now; what events have added stays."""
        by_id = self._desk.backends.by_id
        names = {spec.name for spec in specs}
        for known in list(by_id.values()):
            if known.is_configured and known.spec.name not in names:
                self.remove(BackendId(known.spec.name))
        for spec in specs:
            there = by_id.get(BackendId(spec.name))
            if there is None or there.spec != spec:
                self.add(spec)
            by_id[BackendId(spec.name)].is_configured = True

    def add(self, spec: BackendSpec) -> None:
        """Add or describe anew. Another model or another unit makes it another backend: what runs there is ended."""
        desk, backend_id = self._desk, BackendId(spec.name)
        known = desk.backends.by_id.get(backend_id)
        if known is not None:
            is_same_unit = not spec.declares_capacity or desk.admission.ledger.unit(backend_id) is spec.capacity[0]
            if known.spec.model != spec.model or not is_same_unit:
                self.remove(backend_id)
            else:
                self._forget_dues(backend_id)
                desk.admission.stir(backend_id)  # it may leave a cache that others share
                if known.spec.url != spec.url:  # another engine: nobody's context is there, and it counts for itself
                    desk.residing.forget(backend_id)
                    known.counted.clear()
        desk.backends.add(spec)
        desk.admission.add_backend(spec)
        desk.admission.stir(backend_id)  # or need less of one

    def backend_changed(self, event: e.BackendChanged) -> None:
        """A probe or an operator has spoken; that ends a cooldown, unless failed calls have earned it."""
        desk = self._desk
        if event.backend_id not in desk.backends.by_id:
            desk.counts.stale += 1
            return
        if event.health is BackendHealth.DOWN:
            desk.residing.forget(event.backend_id)
        again_at_s = desk.backends.hear(event.backend_id, event.health, desk.now_s)
        if again_at_s is None:
            desk.agenda.cancel(f"retry:{event.backend_id}")
        else:
            desk.agenda.schedule(f"retry:{event.backend_id}", again_at_s)
        if not desk.backends.by_id[event.backend_id].quiet_until_s > desk.now_s:
            desk.agenda.cancel(f"quiet:{event.backend_id}")

    def backend_removed(self, event: e.BackendRemoved) -> None:
        """An operator took it out."""
        if event.backend_id in self._desk.backends.by_id:
            self.remove(event.backend_id)
        else:
            self._desk.counts.stale += 1

    def model_forgotten(self, event: e.ModelForgotten) -> None:
        """The model behind a name was swapped: the learners begin anew with it, where they can."""
        desk = self._desk
        if event.model in desk.backends.model_by_id and desk.credit.can_forget:
            desk.credit.forget_model(event.model)
        else:
            desk.counts.stale += 1

    def remove(self, backend_id: BackendId) -> None:
        """End what runs on a backend and forget it."""
        desk = self._desk
        failure = Failure(status=502, code="backend_removed", message=f"backend {backend_id!r} was removed")
        for turn in [turn for turn in desk.turns.values() if turn.backend_id == backend_id]:
            self._ending.cancel_turn(turn, failure, outcome=TurnOutcome.FAILED)
        for program in desk.table.by_id.values():
            if program.backend_id == backend_id:
                desk.admission.release_program(program)
                if program.is_open:
                    program.backend_id = None  # its cache is gone with it
        self._forget_dues(backend_id)
        desk.admission.stir(backend_id)  # others may share its cache
        desk.backends.remove(backend_id)
        desk.admission.remove_backend(backend_id)

    def _forget_dues(self, backend_id: BackendId) -> None:
        for kind in ("retry", "quiet", "window"):
            self._desk.agenda.cancel(f"{kind}:{backend_id}")

    def host_restarted(self) -> None:
        """Open turns died with the host; bindings, pending decisions and what is learned stand."""
        desk = self._desk
        for turn in list(desk.turns.values()):
            is_bound = desk.table.by_id[turn.program_id].model is not None
            self._ending.cancel_turn(turn, None, keeps_program=is_bound)
        for called_off in desk.called_off.values():
            desk.spending.settle(called_off, None, desk.now_s)
        desk.called_off.clear()
        for state in desk.backends.by_id.values():
            state.load = OwnLoad()
            state.signals.clear()  # the run's clock stood still meanwhile: they are older than they look (law L10)
        desk.timer_at_s = None

    # --- what is due ---

    def retry_due(self, key: str) -> None:
        """The cooldown is over: one more try decides."""
        self._desk.backends.try_again(BackendId(key))

    def quiet_due(self, key: str) -> None:
        """The backend has been left alone as long as it asked."""
        self._desk.backends.rise(BackendId(key))

    def window_due(self, key: str) -> None:
        """A request has left the rate window."""
        self._desk.backends.stir(BackendId(key))
