"""Moves one engine through real, scaled or stepped time on the running event loop.

One timer per engine, and none while it is idle. The engine is always stepped at its own due instants, even when the
loop wakes late, so that its results do not depend on the machine's load; only their delivery does. Streams are woken
for each token of an engine that knows when its next one is due, and otherwise every `STREAM_TICK_S`.

In stepped time there is no timer at all: the clock stands still until somebody calls `advance`, and the engine is
called at no other time. A client can so call it at exactly the instants at which a virtual host would, and a run is bit
for bit what it is in `sim.world`. Requests that come or go while the clock stands take effect with the next call.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from loadwise.kernel.errors import ConfigError
from loadwise.sim.bounds import SECONDS_MAX
from loadwise.sim.engine import Engine, EngineRequest, Output, wake_at_s
from loadwise.sim.vllm_engine import VllmEngine

STREAM_TICK_S = 0.02
"""Real seconds between two deliveries of a stream, when the engine itself has nothing to say in between."""
TOKEN_TICK_MIN_S = 0.004
"""Real seconds between two deliveries at least: several tokens of faster engines come at once."""

_MOST_STEPS = 5000
"""Engine steps in one go before other tasks get their turn."""

Listener = Callable[[Output], None]


class Heard(NamedTuple):
    """What an engine said, and when."""

    at_s: float
    output: Output


class EngineDriver:
    """Owns an engine's time. All methods are called on the loop, none waits."""

    def __init__(
        self,
        engine: Engine,
        scale: float = 1.0,
        *,
        clock: Callable[[], float] | None = None,
        stream_tick_s: float = STREAM_TICK_S,
        stepped_from_s: float | None = None,
    ) -> None:
        """
        Args:
            scale: Engine seconds per real second.
            clock: Real seconds; the running loop's where absent.
            stepped_from_s: The clock stands at this instant and moves by `advance` only.
        """
        if not 0 < scale < float("inf"):
            raise ConfigError(f"scale is {scale!r}; it must be a finite number > 0")
        if stepped_from_s is not None and scale != 1.0:
            raise ConfigError(f"scale is {scale!r}; a stepped clock has none, so it must be 1")
        self.engine = engine
        self.scale = scale
        self.is_stepped = stepped_from_s is not None
        self._loop = asyncio.get_running_loop()
        self._stepped_at_s = stepped_from_s or 0.0
        self._clock = clock or self._loop.time
        self._began_s = self._clock()
        self._tick_s = stream_tick_s
        self._listeners: dict[int, Listener] = {}
        self._streams: set[int] = set()
        self._engine_at_s = 0.0
        self._due_at_s: float | None = None
        self._seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._heard: list[Heard] = []
        self._is_paused = False
        self._is_touched = False
        """Somebody came or went since a stepped engine was last called."""

    @property
    def now_s(self) -> float:
        """Engine seconds since the start; never falls, and never lags behind what the engine has done."""
        if self.is_stepped:
            return self._stepped_at_s
        return max((self._clock() - self._began_s) * self.scale, self._engine_at_s)

    @property
    def felt_s(self) -> float:
        """Seconds as a client feels them: the clock's, or the stepped ones."""
        return self._stepped_at_s if self.is_stepped else self._clock()

    @property
    def due_at_s(self) -> float | None:
        """When the engine next has something to say by itself; None while it is idle."""
        return self._due_at_s

    @property
    def due_after_s(self) -> float:
        """What the engine answered when it was last called: from that instant, 0 where idle. Not rounded by a sum."""
        return self._seconds

    @property
    def token_due_at_s(self) -> float | None:
        """When the next token is due, which may be earlier; None where idle."""
        if self._due_at_s is None or not isinstance(self.engine, VllmEngine):
            return self._due_at_s
        after_s = self.engine.until_token_s(self._engine_at_s)
        return min(self._engine_at_s + after_s, self._due_at_s) if after_s > 0 else self._due_at_s

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
        self._go_on(now_s)

    def cancel(self, request_id: int) -> None:
        """Stop a request: its slot and KV are free when this returns. Unknown or finished ones are no error."""
        if self._listeners.pop(request_id, None) is None:
            return
        self._streams.discard(request_id)
        now_s = self._bring_to_present()
        self.engine.cancel(request_id)
        self._go_on(now_s)

    def set_speed(self, ratio: float) -> None:
        """Slow the engine down, or set it right again with 1."""
        now_s = self._bring_to_present()
        self.engine.set_speed(ratio)
        self._go_on(now_s)

    def pause(self) -> None:
        """The process hangs: requests are taken and nothing is said until `resume`."""
        self._catch_up()
        self._is_paused = True
        self._arm()

    def resume(self) -> None:
        """Go on; a step that was under way is over by now."""
        self._is_paused = False
        self._step(self.now_s)
        self._arm()

    def signals(self, at_s: float | None = None) -> dict[str, float]:
        """The engine's readings now; in stepped time, as they are at another instant, without moving anything."""
        if at_s is None:
            at_s = self._stepped_at_s if self.is_stepped else self._catch_up()
        return self.engine.signals(at_s)

    def advance(self, to_s: float | None = None, *, in_one_call: bool = False) -> list[Heard]:
        """Move a stepped clock; gives what was said since the last call.

        Args:
            to_s: To this instant; to the next token where absent, or nowhere if the engine is idle.
            in_one_call: The engine is called at `to_s` only, not at its own instants before (it hung in between).

        Raises:
            ConfigError: the clock is not stepped, or would go back.
        """
        if not self.is_stepped:
            raise ConfigError("the clock is not a stepped one, so it cannot be advanced")
        if self._is_touched and not in_one_call:
            self._step(self.now_s)
        if to_s is None:
            to_s = self.now_s if self.token_due_at_s is None else max(self.token_due_at_s, self.now_s)
        if not self.now_s <= to_s <= SECONDS_MAX:  # beyond that a step is lost in the clock's last bits
            raise ConfigError(f"to_s is {to_s!r}; it must be in [{self.now_s!r}, {SECONDS_MAX:.0f}], from the clock on")
        while not in_one_call and self._due_at_s is not None and self._due_at_s <= to_s:
            self._step(self._due_at_s)
        self._stepped_at_s = to_s
        if in_one_call or (self._due_at_s is not None and self._engine_at_s < to_s):
            self._step(to_s)
        heard, self._heard = self._heard, []
        return heard

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
        if self._is_paused:
            return now_s
        for _ in range(_MOST_STEPS):
            if self._due_at_s is None or self._due_at_s > now_s:
                return now_s
            self._step(self._due_at_s)
        # Far behind: stay in the engine's own present, the timer is due at once.
        return self._engine_at_s

    def _go_on(self, now_s: float) -> None:
        """Somebody came or went, so the engine's plan may be another."""
        self._is_touched = True
        if not (self.is_stepped or self._is_paused):
            self._step(now_s)
            self._arm()

    def _bring_to_present(self) -> float:
        if self.is_stepped or self._is_paused:
            return self.now_s
        now_s = self._catch_up()
        if self._due_at_s is not None:
            self._step(now_s)
        return now_s

    def _step(self, at_s: float) -> None:
        self._engine_at_s = at_s
        self._is_touched = False
        step = self.engine.step(at_s)
        self._seconds = step.seconds
        self._due_at_s = wake_at_s(at_s, step.seconds) if step.seconds > 0 else None
        for output in step.outputs:
            if self.is_stepped:
                self._heard.append(Heard(at_s, output))
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
        if self._due_at_s is None or self._is_paused:
            return
        after_s = max((self._due_at_s - self.now_s) / self.scale, 0.0)
        if self._streams:
            after_s = min(after_s, self._tick_after_s())
        self._timer = self._loop.call_later(after_s, self.wake)

    def _tick_after_s(self) -> float:
        due_at_s = self.token_due_at_s
        if due_at_s is None or due_at_s == self._due_at_s:
            return self._tick_s
        return max((due_at_s - self.now_s) / self.scale, min(TOKEN_TICK_MIN_S, self._tick_s))
