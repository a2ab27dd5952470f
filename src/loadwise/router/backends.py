"""What the router believes of each backend: health, our own turns in flight, signals with their ages.

A backend starts as up although nothing has been heard of it: the first failure says otherwise sooner than a probe.
After a failure to connect it is down for a cooldown that doubles up to `COOLDOWN_MAX_S`; then one more try is allowed,
unless a probe has spoken before. A backend that asks for patience (429 or 503, Retry-After) is left alone so long.
"""

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.ids import BackendId, ModelId
from loadwise.kernel.pool import BackendHealth, BackendSpec, ModelSpec, Price, Signal

COOLDOWN_START_S = 1.0
COOLDOWN_MAX_S = 30.0
UNRESPONSIVE_LIMIT = 3
"""Hangs or breaks in a row, before any byte, that take a backend down."""


class BackendState(msgspec.Struct, kw_only=True):
    """One backend as believed."""

    spec: BackendSpec
    health: BackendHealth = BackendHealth.UP
    n_running: int = 0
    n_failures: int = 0
    """Failures since the last success."""
    quiet_until_s: float = 0.0
    """It asked to be left alone until then."""
    signals: dict[str, Signal] = {}


class Backends:
    """The pool as the router sees it."""

    def __init__(self, models: dict[str, ModelSpec], backends: tuple[BackendSpec, ...]) -> None:
        self.model_by_id: dict[ModelId, ModelSpec] = {}
        self.by_id: dict[BackendId, BackendState] = {}
        self._ids_by_model: dict[ModelId, list[BackendId]] = {}
        for name, model in models.items():
            self.add_model(ModelId(name), model)
        for backend in backends:
            self.add(backend)

    def add_model(self, model_id: ModelId, model: ModelSpec) -> None:
        """Let a model join the pool."""
        self.model_by_id[model_id] = model
        self._ids_by_model.setdefault(model_id, [])

    def add(self, spec: BackendSpec) -> None:
        """Let a backend join the pool, or take the new word for a known one."""
        backend_id, model_id = BackendId(spec.name), ModelId(spec.model)
        if model_id not in self.model_by_id:
            raise ConfigError(f"backend {spec.name!r} serves {spec.model!r}, which is not under models")
        known = self.by_id.get(backend_id)
        if known is not None:
            self._ids_by_model[ModelId(known.spec.model)].remove(backend_id)
            known.spec, known.health, known.n_failures = spec, BackendHealth.UP, 0
        else:
            self.by_id[backend_id] = BackendState(spec=spec)
        self._ids_by_model[model_id].append(backend_id)

    def remove(self, backend_id: BackendId) -> None:
        """Let a backend leave the pool."""
        state = self.by_id.pop(backend_id)
        self._ids_by_model[ModelId(state.spec.model)].remove(backend_id)

    def is_usable(self, backend_id: BackendId | None, now_s: float, *, may_drain: bool = False) -> bool:
        """Whether a turn may be sent there; `may_drain` for programs that already live on it."""
        if backend_id is None:
            return False
        state = self.by_id.get(backend_id)
        if state is None or state.quiet_until_s > now_s:
            return False
        return state.health is BackendHealth.UP or (may_drain and state.health is BackendHealth.DRAINING)

    def usable(self, model_id: ModelId, now_s: float) -> list[BackendId]:
        """Backends of a model that take new programs, in the order of the pool file."""
        return [b for b in self._ids_by_model.get(model_id, ()) if self.is_usable(b, now_s)]

    def all_of(self, model_id: ModelId) -> list[BackendId]:
        """Backends of a model whatever their health, in the order of the pool file."""
        return self._ids_by_model.get(model_id, [])

    def price(self, model_id: ModelId) -> Price:
        """The model's price."""
        return self.model_by_id[model_id].usd_per_million

    def note_success(self, backend_id: BackendId) -> None:
        """An answer came: the backend is alive."""
        state = self.by_id.get(backend_id)
        if state is not None and state.n_failures:
            state.n_failures = 0
            if state.health is BackendHealth.DOWN:
                state.health = BackendHealth.UP

    def note_failure(self, backend_id: BackendId, *, is_unreachable: bool) -> float | None:
        """It could not be reached, or did not answer: take it down, at once or after a few in a row.

        Returns:
            Seconds until it may be tried again; None where it stays up or is gone.
        """
        state = self.by_id.get(backend_id)
        if state is None:
            return None
        state.n_failures += 1
        if not is_unreachable and state.n_failures < UNRESPONSIVE_LIMIT:
            return None
        if state.health is BackendHealth.UP:
            state.health = BackendHealth.DOWN
        return min(COOLDOWN_START_S * 2.0 ** min(state.n_failures - 1, 16), COOLDOWN_MAX_S)

    def try_again(self, backend_id: BackendId) -> None:
        """The cooldown is over: one more try decides."""
        state = self.by_id.get(backend_id)
        if state is not None and state.health is BackendHealth.DOWN:
            state.health = BackendHealth.UP

    def observe(self, backend_id: BackendId, values: dict[str, float], observed_at_s: float) -> None:
        """Take a reading. Names that are missing from it keep their older value and its age."""
        state = self.by_id.get(backend_id)
        if state is not None:
            for name, value in values.items():
                state.signals[name] = Signal(value=value, observed_at_s=observed_at_s)
