"""The backends of the virtual world: their engines' time, their time limits, their misfortunes, and who reads them."""

from collections.abc import Callable
from typing import TypeVar

from loadwise.kernel.events import BackendChanged, Event, SignalsObserved
from loadwise.kernel.ids import BackendId
from loadwise.kernel.pool import BackendHealth, BackendSpec
from loadwise.kernel.streams import Streams
from loadwise.kernel.work import AttemptOutcome

from .backend import Attempt, AttemptOver, VirtualBackend
from .calendar import Calendar, Rank
from .engine import Engine, wake_at_s
from .kv_arena import KvArena
from .scenario import Failure, OpenEngine, Scenario, block_bytes_of
from .shared_gpu import SharedGpu, SharedGpuSpec
from .vllm_engine import VllmEngine, VllmEngineSpec

_T = TypeVar("_T")


class Fleet:
    """All backends. What ends is put on the calendar as `over`; readings and health are fed to the machine."""

    def __init__(
        self,
        scenario: Scenario,
        streams: Streams,
        calendar: Calendar,
        feed: Callable[[Event], None],
        over: Callable[[AttemptOver], None],
        open_engine: OpenEngine,
    ) -> None:
        self._scenario = scenario
        self._streams = streams
        self._calendar = calendar
        self._feed = feed
        self._over = over
        self._open_engine = open_engine
        self._token_by_backend: dict[str, object] = {}
        self._flying: dict[tuple[int, int], Attempt] = {}
        self.gpus = {name: self._open_gpu(spec) for name, spec in scenario.gpus.items()}
        self._gpu_of = {backend: self.gpus[name] for name, gpu in scenario.gpus.items() for backend in gpu.backends}
        self.backends = {spec.name: self._open(spec) for spec in scenario.backends}

    def begin(self) -> None:
        """Put the first reading and all misfortunes on the calendar."""
        for failure in self._scenario.failures:
            self._put_later(failure.at_s, Rank.FAILURE, self._fail, failure)
        if self._scenario.signals.every_s > 0:
            self._calendar.put(0.0, Rank.PROBE, self._probe, is_background=True)

    def start(self, attempt: Attempt) -> None:
        """Send an attempt to its backend."""
        backend, now_s = self.backends[attempt.backend_id], self._calendar.now_s
        self._flying[attempt.turn_id, attempt.n] = attempt
        self._put_later(now_s + backend.spec.first_byte_timeout_s, Rank.ENGINE, self._time_out, attempt)
        backend.start(attempt, now_s)

    def take_back(self, turn_id: int, n: int) -> bool:
        """Cancel an attempt. False where it is over already."""
        attempt = self._flying.get((turn_id, n))
        return attempt is not None and self._close(attempt, AttemptOutcome.CANCELLED, "taken back")

    def check(self) -> None:
        """The engines' own laws."""
        for backend in self.backends.values():
            backend.check(self._calendar.now_s)

    def _open(self, spec: BackendSpec) -> VirtualBackend:
        name = spec.name
        return VirtualBackend(
            spec, lambda: self._engine_of(name), lambda after_s: self._wake(name, after_s), self._put_over
        )

    def _engine_of(self, name: str) -> Engine:
        spec, gpu = self._scenario.engine_spec(name), self._gpu_of.get(name)
        if gpu is None:
            return self._open_engine(spec, self._streams, name)
        if gpu.arena is None or not isinstance(spec, VllmEngineSpec):
            return gpu.join(name, self._open_engine(spec, self._streams, name))
        pool = gpu.arena.open(name, block_bytes_of(spec), lambda: gpu.memory_freed(name))
        return gpu.join(name, VllmEngine(spec, shared_pool=pool))

    def _open_gpu(self, spec: SharedGpuSpec) -> SharedGpu:
        gpu = SharedGpu(spec, lambda: self._calendar.now_s, self._poke)
        if spec.shares_kv:
            gpu.arena = KvArena(self._scenario.shared_kv_bytes(spec))
        return gpu

    def _poke(self, name: str) -> None:
        """Bring a backend's engine to the present after what happens now: its rate or its memory changed."""
        self._put_later(self._calendar.now_s, Rank.ENGINE, self._catch_up, name)

    def _catch_up(self, name: str) -> None:
        self.backends[name].advance(self._calendar.now_s)

    def _put_over(self, over: AttemptOver) -> None:
        self._flying.pop((over.attempt.turn_id, over.attempt.n), None)
        self._calendar.put(self._calendar.now_s, Rank.ATTEMPT_OVER, lambda: self._over(over))

    def _put_later(self, at_s: float, rank: Rank, do: Callable[[_T], object], argument: _T) -> None:
        def act() -> None:
            do(argument)

        self._calendar.put(at_s, rank, act, is_background=True)

    def _wake(self, name: str, after_s: float | None) -> None:
        token = object()
        self._token_by_backend[name] = token
        if after_s is not None:
            at_s = wake_at_s(self._calendar.now_s, after_s)
            self._calendar.put(at_s, Rank.ENGINE, lambda: self._advance(name, token))

    def _advance(self, name: str, token: object) -> None:
        if self._token_by_backend.get(name) is token:
            self.backends[name].advance(self._calendar.now_s)

    def _close(self, attempt: Attempt, outcome: AttemptOutcome, detail: str) -> bool:
        backend = self.backends[attempt.backend_id]
        return backend.take_back(attempt.request.request_id, outcome, self._calendar.now_s, detail)

    def _time_out(self, attempt: Attempt) -> None:
        if attempt.first_byte_at_s is None:
            self._close(attempt, AttemptOutcome.FIRST_BYTE_TIMEOUT, "no first byte in time")

    def _idle_out(self, attempt: Attempt) -> None:
        if not self.backends[attempt.backend_id].is_answering:
            self._close(attempt, AttemptOutcome.IDLE_TIMEOUT, "no further byte in time")

    def _fail(self, failure: Failure) -> None:
        now_s, backend = self._calendar.now_s, self.backends[failure.backend]
        if failure.kind == "crash":
            backend.crash()
        elif failure.kind == "slow":
            backend.slow(failure.speed_ratio, now_s)
        else:
            backend.hang()
            for attempt in backend.attempts.values():
                if attempt.first_byte_at_s is not None:
                    self._put_later(now_s + backend.spec.idle_timeout_s, Rank.ENGINE, self._idle_out, attempt)
        if failure.for_s is not None:
            self._put_later(now_s + failure.for_s, Rank.FAILURE, self._recover, backend)

    def _recover(self, backend: VirtualBackend) -> None:
        backend.recover(self._calendar.now_s)

    def _probe(self) -> None:
        now_s, spec = self._calendar.now_s, self._scenario.signals
        self._calendar.put(now_s + spec.every_s, Rank.PROBE, self._probe, is_background=True)
        for name, backend in self.backends.items():
            health = BackendHealth.UP if backend.is_answering else BackendHealth.DOWN
            if health is not backend.seen_health:
                backend.seen_health = health
                self._feed(BackendChanged(at_s=now_s, backend_id=BackendId(name), health=health, detail="probe"))
            if health is BackendHealth.UP:
                self._observe(BackendId(name), backend.signals(now_s))

    def _observe(self, backend_id: BackendId, values: dict[str, float]) -> None:
        observed_at_s = self._calendar.now_s

        def tell() -> None:
            at_s = self._calendar.now_s
            self._feed(SignalsObserved(at_s=at_s, backend_id=backend_id, values=values, observed_at_s=observed_at_s))

        if self._scenario.signals.delay_s > 0:
            at_s = observed_at_s + self._scenario.signals.delay_s
            self._calendar.put(at_s, Rank.PROBE, tell, is_background=True)
        else:
            tell()
