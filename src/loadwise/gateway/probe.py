"""Watches backends: engine metrics become signals, and a backend that answers (or stops answering) is said to be so.

What engines show is read by `readers`, one for each kind; of a paid API what we send and what its headers say is told
instead. A signal that cannot be read is absent, never zero. Readings that did not change are told every `REPEAT_S`, so
that a signal's age says when it was last known to be true. No decision ever waits for a probe.

A backend is called down when nobody listens there, or after `MISSES_MAX` looks in a row without a good answer: a busy
engine may be slow to show its metrics. One that goes on answering turns meanwhile is only slow, for however long, and
one that was called down and answers a turn after all is there again. A cooldown that failed calls have earned it is the
router's, and runs out by itself: that the backend can be reached says nothing of the calls that it does not answer.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable

from loadwise.kernel import events as e
from loadwise.kernel.ids import BackendId
from loadwise.kernel.pool import BackendHealth
from loadwise.wire.client import Answer, UpstreamError

from .backend import BackendLink
from .host import Host
from .readers.kinds import make_reader

TIMEOUT_S = 2.0
MISSES_MAX = 3
API_INTERVAL_S = 30.0
"""Between two looks at a paid API, whose list of models says only that it is there."""
REPEAT_S = 2.0


class Probe:
    """Polls one backend for as long as the gateway runs."""

    def __init__(
        self, host: Host, link: BackendLink, interval_s: float, *, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._host = host
        self._say = say
        self._link = link
        self.backend_id = BackendId(link.spec.name)
        self.interval_s = interval_s
        self._reader = make_reader(link.spec)
        self._looked_at_s = -math.inf
        self._told: dict[str, float] = {}
        self._told_at_s = -math.inf
        self._n_misses = 0
        """Looks in a row without a good answer, and without one to a turn."""
        self._n_heard = link.upstream.n_heard
        """How often turns had heard of the backend when the last look was over."""
        self._has_said_down = False
        self.is_reachable: bool | None = None
        """None before the first answer or failure."""
        self.detail = ""

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self.interval_s)
            await self.poll()

    async def poll(self) -> None:
        """Look once; whatever happens, the next look comes."""
        try:
            await self._poll()
        except Exception as problem:
            context = {"message": f"the probe of backend {self.backend_id!r} raised", "exception": problem}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _poll(self) -> None:
        if self._reader is None:
            await self._poll_api()
            return
        began_at_s = self._host.now_s()
        path, *others = self._reader.paths(began_at_s)
        bodies: dict[str, bytes] = {}
        if not await self._look(path, bodies, from_root=True):
            return
        for other in others:
            with contextlib.suppress(UpstreamError):  # what stands there is a help, not a sign of life
                answer = await self._ask(other)
                bodies.update({other: answer.body} if answer.status == 200 else {})
        # Dated back to before the first question: what we sent meanwhile may be missing from it.
        self._tell_signals(self._reader.read(bodies, began_at_s), began_at_s)

    async def _poll_api(self) -> None:
        """A paid API is asked for its models now and then; what we know of it ourselves is told every time."""
        now_s = self._host.now_s()
        if now_s - self._looked_at_s >= API_INTERVAL_S:
            self._looked_at_s = now_s
            if not await self._look("/models", {}, from_root=False):
                return
        if self._link.meter is not None and self.is_reachable:
            now_s = self._host.now_s()
            self._tell_signals(self._link.meter.read(now_s), now_s)

    async def _ask(self, path: str, *, from_root: bool = True) -> Answer:
        return await self._link.watched.get(
            path, timeout_s=TIMEOUT_S, from_root=from_root, headers=self._link.request_headers
        )

    async def _look(self, path: str, bodies: dict[str, bytes], *, from_root: bool) -> bool:
        """Whether the backend gives a sign of life; a good page goes into `bodies`."""
        try:
            answer = await self._ask(path, from_root=from_root)
        except UpstreamError as error:
            is_slow = "timeout" in error.kind
            if is_slow and self._link.upstream.n_heard != self._n_heard:
                self._n_misses = 0
                self._tell_up()
            else:
                self._miss(str(error), is_slow=is_slow, is_refused=error.kind == "refused")
            return False
        finally:
            self._n_heard = self._link.upstream.n_heard
        # 501 is how llama.cpp says that its metrics are off: it is alive.
        if answer.status >= 500 and answer.status != 501:
            self._miss(f"{path} answered {answer.status}")
            return False
        self._n_misses = 0
        self._tell_up()
        if answer.status == 200:
            bodies[path] = answer.body
        return True

    def _miss(self, detail: str, *, is_slow: bool = False, is_refused: bool = False) -> None:
        """No good answer. Where there never was one, nothing speaks for the backend, unless it is only slow."""
        self._n_misses += 1
        self.detail = detail
        is_new = self.is_reachable is None and not is_slow
        if is_refused or is_new or self._n_misses >= MISSES_MAX:
            self._tell_down(detail)

    def _tell_down(self, detail: str) -> None:
        if self.is_reachable is not False:
            self._say(f"backend {self.backend_id!r} cannot be used: {detail}; trying every {self.interval_s:g} s")
        self.is_reachable = False
        state = self._host.router.backends.by_id.get(self.backend_id)
        if state is None or state.health is BackendHealth.DRAINING:
            return
        # A cooldown ends with one more try at clients' cost; that nobody is there is known better.
        if state.health is not BackendHealth.DOWN or state.is_cooling:
            self._has_said_down = True
            self._post(BackendHealth.DOWN, detail)

    def _tell_up(self) -> None:
        if self.is_reachable is False:
            self._say(f"backend {self.backend_id!r} can be used")
        self.is_reachable, self.detail = True, ""
        state = self._host.router.backends.by_id.get(self.backend_id)
        if state is None or state.health is not BackendHealth.DOWN:
            self._has_said_down = False
        elif self._has_said_down or not (state.is_cooling and state.has_failed_calls):
            self._has_said_down = False
            self._post(BackendHealth.UP, "")

    def _post(self, health: BackendHealth, detail: str) -> None:
        self._host.post(
            e.BackendChanged(at_s=self._host.now_s(), backend_id=self.backend_id, health=health, detail=detail[:200])
        )

    def _tell_signals(self, values: dict[str, float], observed_at_s: float) -> None:
        now_s = self._host.now_s()
        if not values or (values == self._told and now_s - self._told_at_s < REPEAT_S):
            return
        self._told, self._told_at_s = values, now_s
        self._host.post(
            e.SignalsObserved(at_s=now_s, backend_id=self.backend_id, values=values, observed_at_s=observed_at_s)
        )
