"""Moves one engine through real or scaled time on the running event loop.

One timer per engine, and none while it is idle. The engine is always stepped at its own due instants, even when the
loop wakes late, so that its results do not depend on the machine's load; only their delivery does.
"""

import asyncio
from collections.abc import Callable

from loadwise.kernel.errors import ConfigError
from loadwise.sim.engine import Engine, EngineRequest, Output

STREAM_TICK_S = 0.02
"""Real seconds between two deliveries of a stream, when the engine itself has nothing to say in between."""

_MOST_STEPS = 5000
"""Engine steps in one go before other tasks get their turn."""

Listener = Callable[[Output], None]


class EngineDriver:
    """Owns an engine's time. All methods are called on the loop, none waits."""

    def __init__(
        self,
        engine: Engine,
        scale: float = 1.0,
        *,
        clock: Callable[[], float] | None = None,
        stream_tick_s: float = STREAM_TICK_S,
    ) -> None:
        """
        Args:
            scale: Engine seconds per real second.
            clock: Real seconds; the running loop's where absent.
        """
        if not 0 < scale < float("inf"):
            raise ConfigError(f"scale is {scale!r}; it must be a finite number > 0")
        self.engine = engine
        self.scale = scale
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._began_s = self._clock()
        self._tick_s = stream_tick_s
        self._listeners: dict[int, Listener] = {}
        self._streams: set[int] = set()
        self._engine_at_s = 0.0
        self._due_at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now_s(self) -> float:
        """Engine seconds since the start; never falls, and never lags behind what the engine has done."""
        return max((self._clock() - self._began_s) * self.scale, self._engine_at_s)

    @property
    def n_open(self) -> int:
        """Requests that somebody listens to."""
        return len(self._listeners)

    def submit(self, request: EngineRequest, listener: Listener, *, is_stream: bool = False) -> None:
        """Hand a request to the engine; `listener` hears its outputs.

        Raises:
            CallerError, Overloaded: as the engine's `submit`.
        """
        now_s = self._bring_to_present()
        self.engine.submit(request)
        self._listeners[request.request_id] = listener
        if is_stream:
            self._streams.add(request.request_id)
        self._step(now_s)
        self._arm()

    def cancel(self, request_id: int) -> None:
        """Stop a request: its slot and KV are free when this returns. Unknown or finished ones are no error."""
        if self._listeners.pop(request_id, None) is None:
            return
        self._streams.discard(request_id)
        now_s = self._bring_to_present()
        self.engine.cancel(request_id)
        self._step(now_s)
        self._arm()

    def set_speed(self, ratio: float) -> None:
        """Slow the engine down, or set it right again with 1."""
        now_s = self._bring_to_present()
        self.engine.set_speed(ratio)
        self._step(now_s)
        self._arm()

    def signals(self) -> dict[str, float]:
        """The engine's readings now."""
        return self.engine.signals(self._catch_up())

    def close(self) -> None:
        """Stop for good; nobody hears anything any more."""
        self._listeners.clear()
        self._streams.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """Do what is due; the timer calls this, and a test with a clock of its own."""
        self._timer = None
        now_s = self._catch_up()
        if self._streams and (self._due_at_s is None or self._due_at_s > now_s):
            self._step(now_s)
        self._arm()

    def _catch_up(self) -> float:
        now_s = self.now_s
        for _ in range(_MOST_STEPS):
            if self._due_at_s is None or self._due_at_s > now_s:
                return now_s
            self._step(self._due_at_s)
        # Far behind: stay in the engine's own present, the timer is due at once.
        return self._engine_at_s

    def _bring_to_present(self) -> float:
        now_s = self._catch_up()
        if self._due_at_s is not None:
            self._step(now_s)
        return now_s

    def _step(self, at_s: float) -> None:
        self._engine_at_s = at_s
        step = self.engine.step(at_s)
        self._due_at_s = at_s + step.seconds if step.seconds > 0 else None
        for output in step.outputs:
            listener = self._listeners.get(output.request_id)
            if output.is_finished:
                self._listeners.pop(output.request_id, None)
                self._streams.discard(output.request_id)
            if listener is not None:
                listener(output)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due_at_s is None:
            return
        after_s = max((self._due_at_s - self.now_s) / self.scale, 0.0)
        if self._streams:
            after_s = min(after_s, self._tick_s)
        self._timer = self._loop.call_later(after_s, self.wake)
