"""What the router believes of each backend: health, our own turns in flight, signals with their ages.

A backend starts as up although nothing has been heard of it: the first failure says otherwise sooner than a probe.
After a failure to connect, or a few failed calls in a row, it is down for a cooldown that doubles up to
`COOLDOWN_MAX_S`; then it is *on trial*: one turn at a time until one has an answer. A probe that can reach it ends a
cooldown earned by unreachability. One earned by failed calls it does not: an engine may show its metrics and answer
every call with an error at once, and being the least loaded for it would draw all traffic. A backend that asks for
patience (429 or 503, Retry-After) is left alone so long.

Whenever a backend may have become able to take a held turn, its model is noted in `roomy`.
"""

import hashlib
import math

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.ids import BackendId, ModelId, ProgramId, TurnId
from loadwise.kernel.pool import BackendHealth, BackendSpec, ModelSpec, Price, Signal

from .load import OwnLoad

COOLDOWN_START_S = 1.0
COOLDOWN_MAX_S = 30.0
UNRESPONSIVE_LIMIT = 3
"""Failed calls in a row (hangs, breaks before any byte, server errors) that take a backend down.

One client's poisonous requests must not take it from all others: what fails for one program in a row counts once."""
CONTEXT_MAX_TOKENS = 16_000_000
"""No engine answers in a longer context, whatever its backend is counted in."""
SIGNALS_MAX = 64
"""Names of signals remembered of one backend (law L15)."""
COUNTED = ("prompt_tokens", "generation_tokens")
"""Signals that only ever grow while an engine runs."""


class BackendState(msgspec.Struct, kw_only=True):
    """One backend as believed."""

    spec: BackendSpec
    health: BackendHealth = BackendHealth.UP
    is_configured: bool = False
    """It stands as it is in the pool file; False once an event has added it or described it anew."""
    n_running: int = 0
    n_failures: int = 0
    """Failures since the last success; calls of one program that fail in a row count once."""
    failed_program_id: ProgramId | None = None
    """Whose call has failed last, since the last success."""
    is_cooling: bool = False
    """We took it down ourselves, until `cools_until_s`."""
    cools_until_s: float = -math.inf
    has_failed_calls: bool = False
    """Its last failure was a call that it took and did not answer; False where it could not be reached."""
    is_joining: bool = False
    """It has joined others, or come back to them, and has fewer programs yet than each of them (`admission`)."""
    took_last: bool = False
    """The latest program of its model that got a place got it here."""
    is_on_trial: bool = False
    """It takes one turn at a time, until one has an answer."""
    trial_turn_id: TurnId | None = None
    """That one turn, while it runs."""
    quiet_until_s: float = -math.inf
    """It asked to be left alone until then."""
    signals: dict[str, Signal] = {}
    counted: dict[str, Signal] = {}
    """What it had counted at the latest reading; unlike signals it stays when the host is restarted."""
    load: OwnLoad = msgspec.field(default_factory=OwnLoad)
    """Our calls in flight, for the dead reckoning between two readings."""
    read_at_s: float = -math.inf
    """Instant of the latest reading."""


class Backends:
    """The pool as the router sees it."""

    def __init__(self, models: dict[str, ModelSpec], backends: tuple[BackendSpec, ...]) -> None:
        self.model_by_id: dict[ModelId, ModelSpec] = {}
        self.by_id: dict[BackendId, BackendState] = {}
        self.roomy: dict[ModelId, None] = {}
        """Models whose held turns should be looked at again."""
        self.risen: dict[ModelId, None] = {}
        """Those among them of which a backend takes turns again: whose program lives there need not stand in line."""
        self._ids_by_model: dict[ModelId, list[BackendId]] = {}
        for name, model in models.items():
            self.add_model(ModelId(name), model)
        for backend in backends:
            self.add(backend, is_configured=True)

    def add_model(self, model_id: ModelId, model: ModelSpec) -> None:
        """Let a model join the pool, or take the new word for a known one."""
        self.model_by_id[model_id] = model
        self._ids_by_model.setdefault(model_id, [])

    def add(self, spec: BackendSpec, *, is_configured: bool = False) -> None:
        """Let a backend join the pool, or describe a known one of the same model anew; either way it counts as up."""
        backend_id, model_id = BackendId(spec.name), ModelId(spec.model)
        if model_id not in self.model_by_id:
            raise ConfigError(f"backend {spec.name!r} serves {spec.model!r}, which is not under models")
        known = self.by_id.get(backend_id)
        if known is None:
            self.by_id[backend_id] = BackendState(spec=spec, is_configured=is_configured, is_joining=not is_configured)
            self._ids_by_model[model_id].append(backend_id)
        else:
            assert known.spec.model == model_id
            known.spec, known.is_configured = spec, is_configured
            self.set_health(backend_id, BackendHealth.UP)
        self.rise(backend_id)

    def remove(self, backend_id: BackendId) -> None:
        """Let a backend leave the pool."""
        model_id = ModelId(self.by_id.pop(backend_id).spec.model)
        self._ids_by_model[model_id].remove(backend_id)
        self.roomy[model_id] = None

    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with the pool's models and backends, health aside."""
        pool = (self.model_by_id, [state.spec for state in self.by_id.values()])
        return hashlib.sha256(msgspec.json.encode(pool)).hexdigest()[:16]

    def replace(self, models: dict[ModelId, ModelSpec], states: list[BackendState]) -> None:
        """Take over the pool of a dump, order included: candidates are listed in it."""
        self.model_by_id = dict(models)
        self.by_id = {BackendId(state.spec.name): state for state in states}
        self._ids_by_model = {model_id: [] for model_id in models}
        self.roomy.clear()
        self.risen.clear()  # a dump is made between events, when everybody has been looked at
        for backend_id, state in self.by_id.items():
            self._ids_by_model[ModelId(state.spec.model)].append(backend_id)

    def is_usable(self, backend_id: BackendId | None, now_s: float, *, may_drain: bool = False) -> bool:
        """Whether a turn may be sent there; `may_drain` for programs that already live on it."""
        if backend_id is None:
            return False
        state = self.by_id.get(backend_id)
        if state is None or state.quiet_until_s > now_s or state.trial_turn_id is not None:
            return False
        return state.health is BackendHealth.UP or (may_drain and state.health is BackendHealth.DRAINING)

    def usable(self, model_id: ModelId, now_s: float) -> list[BackendId]:
        """Backends of a model that take new programs, in the order of the pool file."""
        usable = []
        for backend_id in self._ids_by_model.get(model_id, ()):
            state = self.by_id[backend_id]
            if state.health is BackendHealth.UP and state.quiet_until_s <= now_s and state.trial_turn_id is None:
                usable.append(backend_id)
        return usable

    def note_start(self, backend_id: BackendId, n_by_replica: dict[BackendId, int]) -> None:
        """A program has got a place there.

        Who has joined has caught up when a program goes elsewhere although it has as many as the least of the others.

        Args:
            n_by_replica: programs on each backend of the model that takes turns, this one among them.
        """
        for replica in self.all_of(ModelId(self.by_id[backend_id].spec.model)):
            state = self.by_id[replica]
            state.took_last = replica == backend_id
            if state.is_joining and replica in n_by_replica:
                elsewhere = [n for b, n in n_by_replica.items() if b != replica]
                if not elsewhere or (replica != backend_id and n_by_replica[replica] >= min(elsewhere)):
                    state.is_joining = False

    def returns_at_s(self, model_id: ModelId, now_s: float) -> float:
        """When the first backend of a model takes turns again, as far as time alone decides; infinity where none does.

        One that could not be reached is not counted on: its cooldown says when to try, not when it will be there.
        """
        return min((self._returns_at_s(self.by_id[b], now_s) for b in self.all_of(model_id)), default=math.inf)

    @staticmethod
    def _returns_at_s(state: BackendState, now_s: float) -> float:
        if state.health is BackendHealth.UP:
            return max(state.quiet_until_s, now_s)
        if state.is_cooling and state.has_failed_calls:
            return max(state.quiet_until_s, state.cools_until_s)
        return math.inf

    def all_of(self, model_id: ModelId) -> list[BackendId]:
        """Backends of a model whatever their health, in the order of the pool file."""
        return self._ids_by_model.get(model_id, [])

    def price(self, model_id: ModelId) -> Price:
        """The model's price."""
        return self.model_by_id[model_id].usd_per_million

    def tokens_max(self, model_id: ModelId, backend_id: BackendId | None) -> int:
        """More tokens than these cannot be in one context there, whatever the engine says."""
        limit_tokens = CONTEXT_MAX_TOKENS
        context_tokens = self.model_by_id[model_id].context_tokens
        if context_tokens is not None and context_tokens < limit_tokens:
            limit_tokens = context_tokens
        state = None if backend_id is None else self.by_id.get(backend_id)
        kv_tokens = None if state is None else state.spec.kv_tokens
        return limit_tokens if kv_tokens is None else min(limit_tokens, kv_tokens)

    def stir(self, backend_id: BackendId) -> None:
        """Something of the backend came free, or may have."""
        state = self.by_id.get(backend_id)
        if state is not None:
            self.roomy[ModelId(state.spec.model)] = None

    def rise(self, backend_id: BackendId) -> None:
        """The backend takes turns again, or may: first those of the programs that live there."""
        state = self.by_id.get(backend_id)
        if state is not None:
            model_id = ModelId(state.spec.model)
            self.roomy[model_id] = self.risen[model_id] = None

    def set_health(self, backend_id: BackendId, health: BackendHealth) -> None:
        """An answer, or an operator: whatever we made of failures is forgotten."""
        state = self.by_id[backend_id]
        state.is_joining |= state.health is BackendHealth.DOWN and health is BackendHealth.UP
        state.health, state.is_cooling = health, False
        if health is BackendHealth.UP:
            state.n_failures, state.failed_program_id, state.quiet_until_s = 0, None, -math.inf
            state.cools_until_s, state.has_failed_calls = -math.inf, False
            state.is_on_trial, state.trial_turn_id = False, None
        self.rise(backend_id)

    def hear(self, backend_id: BackendId, health: BackendHealth, now_s: float) -> float | None:
        """A probe has spoken. That a backend can be reached says nothing of the calls that it has failed.

        Returns:
            When it may be tried, where it has to sit out a cooldown that failed calls have earned.
        """
        state = self.by_id[backend_id]
        if health is not BackendHealth.UP or not state.has_failed_calls:
            self.set_health(backend_id, health)
            return None
        if state.cools_until_s > now_s:
            state.health, state.is_cooling = BackendHealth.DOWN, True
            return state.cools_until_s
        if state.health is not BackendHealth.UP:
            state.health, state.is_cooling, state.is_joining = BackendHealth.UP, False, True
            state.is_on_trial = state.n_failures >= UNRESPONSIVE_LIMIT
            self.rise(backend_id)
        return None

    def note_success(self, backend_id: BackendId) -> None:
        """An answer came: the backend is alive."""
        state = self.by_id[backend_id]
        if state.n_failures:
            state.n_failures, state.failed_program_id, state.has_failed_calls = 0, None, False
            if state.is_cooling:
                self.set_health(backend_id, BackendHealth.UP)
        if state.is_on_trial:
            state.is_on_trial, state.trial_turn_id = False, None
            self.rise(backend_id)

    def begin_trial(self, state: BackendState, turn_id: TurnId) -> None:
        """A turn goes to a backend that is on trial: no other does until this one is back."""
        state.trial_turn_id = turn_id

    def end_trial(self, backend_id: BackendId, state: BackendState) -> None:
        """The turn on trial is back, whatever it says: the next may try."""
        state.trial_turn_id = None
        self.rise(backend_id)

    def note_failure(
        self, backend_id: BackendId, now_s: float, *, is_unreachable: bool, program_id: ProgramId | None = None
    ) -> float | None:
        """It could not be reached, or did not answer: take it down, at once or after a few in a row.

        Returns:
            When it may be tried again; None where that is not ours to say: it stays up, or somebody else took it down.
        """
        state = self.by_id[backend_id]
        is_repeated = program_id is not None and program_id == state.failed_program_id
        if is_unreachable or not is_repeated or state.n_failures >= UNRESPONSIVE_LIMIT or state.is_on_trial:
            state.n_failures += 1
        if not is_unreachable:
            state.failed_program_id = program_id
        state.has_failed_calls = not is_unreachable
        if not is_unreachable and state.n_failures < UNRESPONSIVE_LIMIT:
            return None
        if state.health is BackendHealth.UP:
            state.health, state.is_cooling = BackendHealth.DOWN, True
            state.is_on_trial, state.trial_turn_id = False, None
            self.stir(backend_id)  # who waited for this backend may now take one that it had tried
        if not state.is_cooling:
            return None
        n_doublings = min(state.n_failures - (1 if is_unreachable else UNRESPONSIVE_LIMIT), 16)
        state.cools_until_s = now_s + min(COOLDOWN_START_S * 2.0**n_doublings, COOLDOWN_MAX_S)
        return state.cools_until_s

    def try_again(self, backend_id: BackendId) -> None:
        """The cooldown is over: one more try decides."""
        state = self.by_id.get(backend_id)
        if state is not None and state.is_cooling:
            state.health, state.is_cooling, state.is_on_trial = BackendHealth.UP, False, True
            state.is_joining = True
            self.rise(backend_id)

    def keep_quiet(self, backend_id: BackendId, until_s: float) -> float:
        """It asked to be left alone; the longest such wish counts. Returns until when."""
        state = self.by_id[backend_id]
        state.quiet_until_s = max(state.quiet_until_s, until_s)
        self.stir(backend_id)
        return state.quiet_until_s

    def observe(self, backend_id: BackendId, values: dict[str, float], observed_at_s: float, now_s: float) -> int:
        """Take a reading. Names that are missing from it, or were read later already, keep their value and its age.

        Returns:
            How many values were refused: not a number, read in the future, or of one name too many.
        """
        state = self.by_id[backend_id]
        signals = state.signals
        if not observed_at_s <= now_s:
            return len(values)
        n_refused = 0
        for name, value in values.items():
            known = signals.get(name)
            if not math.isfinite(value) or (known is None and len(signals) >= SIGNALS_MAX):
                n_refused += 1
            elif known is None or known.observed_at_s <= observed_at_s:
                signals[name] = Signal(value=value, observed_at_s=observed_at_s)
                if name in COUNTED:
                    state.counted[name] = signals[name]
        if observed_at_s >= state.read_at_s:
            state.read_at_s = observed_at_s
            state.load.read(observed_at_s, {name: value for name, value in values.items() if math.isfinite(value)})
        return n_refused

    def has_begun_anew(
        self, backend_id: BackendId, values: dict[str, float], observed_at_s: float, now_s: float
    ) -> bool:
        """Whether a reading shows that the engine was started again: what it counts is less than it was.

        A value that `observe` refuses shows nothing.
        """
        if not observed_at_s <= now_s:
            return False
        known = ((old, values.get(name, math.inf)) for name, old in self.by_id[backend_id].counted.items())
        return any(old.observed_at_s < observed_at_s and -math.inf < new < old.value for old, new in known)

    def begin_call(self, backend_id: BackendId, tokens: int, now_s: float) -> BackendState:
        """A turn goes out to the backend."""
        state = self.by_id[backend_id]
        state.n_running += 1
        state.load.change(now_s, 1, tokens)
        return state

    def end_call(self, backend_id: BackendId, tokens: int, now_s: float) -> BackendState:
        """A turn is off the backend."""
        state = self.by_id[backend_id]
        state.n_running -= 1
        state.load.change(now_s, -1, -tokens)
        return state

    def n_others(self, backend_id: BackendId, now_s: float, max_age_s: float) -> float:
        """Calls of other clients there; none where nothing fresh is known of them (law L10: then they are unknown)."""
        state = self.by_id[backend_id]
        if state.load.n_others is None or now_s - state.read_at_s > max_age_s:
            return 0.0
        return state.load.n_others

    def kv_usage_ratio(self, backend_id: BackendId, now_s: float, max_age_s: float) -> float | None:
        """KV usage now, by dead reckoning; None where nothing fresh is known."""
        state = self.by_id[backend_id]
        signal = state.signals.get("kv_usage_ratio")
        if signal is None or signal.fresh(now_s, max_age_s) is None:
            return None
        return state.load.kv_usage_ratio(state.spec.kv_tokens)

    def signal(self, backend_id: BackendId, name: str, now_s: float, max_age_s: float) -> float | None:
        """A reading, or None where it is absent or stale."""
        signal = self.by_id[backend_id].signals.get(name)
        return None if signal is None else signal.fresh(now_s, max_age_s)
