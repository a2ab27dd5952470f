"""Watches backends: engine metrics become signals, and a backend that answers (or stops answering) is said to be so.

A signal that cannot be read is absent, never zero. Readings that did not change are told every `REPEAT_S`, so that a
signal's age says when it was last known to be true.

A backend is called down when nobody listens there, or after `MISSES_MAX` looks in a row without a good answer: a busy
engine may be slow to show its metrics. A cooldown that failed calls have earned it is the router's, and runs out by
itself: that the backend can be reached says nothing of the calls that it does not answer.
"""

import asyncio
import math
import re
from collections.abc import Callable

from loadwise.kernel import events as e
from loadwise.kernel.ids import BackendId
from loadwise.kernel.pool import BackendHealth
from loadwise.wire.client import UpstreamError

from .backend import BackendLink
from .host import Host

TIMEOUT_S = 2.0
MISSES_MAX = 3
API_INTERVAL_S = 30.0
"""Between two looks at a paid API, whose list of models says only that it is there."""
REPEAT_S = 2.0

SIGNAL_BY_METRIC: dict[str, str] = {
    "vllm:num_requests_running": "n_running",
    "vllm:num_requests_waiting": "n_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage_ratio",
    "vllm:gpu_cache_usage_perc": "kv_usage_ratio",
    "vllm:prefix_cache_queries_total": "prefix_queries_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hits_tokens",
    "vllm:gpu_prefix_cache_queries_total": "prefix_queries_tokens",
    "vllm:gpu_prefix_cache_hits_total": "prefix_hits_tokens",
    "vllm:num_preemptions_total": "n_preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "sglang:num_running_reqs": "n_running",
    "sglang:num_queue_reqs": "n_waiting",
    "sglang:token_usage": "kv_usage_ratio",
    "llamacpp:requests_processing": "n_running",
    "llamacpp:requests_deferred": "n_waiting",
}
_LINE = re.compile(rf"^(?:{'|'.join(map(re.escape, SIGNAL_BY_METRIC))})[ {{].*$", re.MULTILINE)
_LARGEST = frozenset({"kv_usage_ratio"})
"""Signals of which the largest of several engines counts; of the others the sum."""


def read_signals(text: str) -> dict[str, float]:
    """The signals in a page of Prometheus metrics, by exact metric name.

    >>> read_signals('vllm:num_requests_running{engine="0"} 2.0\\nvllm:kv_cache_usage_perc{engine="0"} 9.75e-06\\n')
    {'n_running': 2.0, 'kv_usage_ratio': 9.75e-06}
    """
    values: dict[str, float] = {}
    for line in _LINE.findall(text):  # an engine's page may have thousands of others
        signal = SIGNAL_BY_METRIC[line.partition("{")[0].partition(" ")[0]]
        try:
            value = float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1])
        except (ValueError, IndexError):
            continue
        if not math.isfinite(value):
            continue
        known = values.get(signal)
        if known is None:
            values[signal] = value
        else:
            values[signal] = max(known, value) if signal in _LARGEST else known + value
    return values


class Probe:
    """Polls one backend for as long as the gateway runs."""

    def __init__(
        self, host: Host, link: BackendLink, interval_s: float, *, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._host = host
        self._say = say
        self._link = link
        self.backend_id = BackendId(link.spec.name)
        self.interval_s = max(interval_s, API_INTERVAL_S) if link.spec.engine == "api" else interval_s
        self._told: dict[str, float] = {}
        self._told_at_s = -math.inf
        self._n_misses = 0
        """Looks in a row without a good answer."""
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
        path, from_root = ("/models", False) if self._link.spec.engine == "api" else ("/metrics", True)
        try:
            answer = await self._link.watched.get(
                path, timeout_s=TIMEOUT_S, from_root=from_root, headers=self._link.request_headers
            )
        except UpstreamError as error:
            self._miss(str(error), is_slow="timeout" in error.kind, is_refused=error.kind == "refused")
            return
        # 501 is how llama.cpp says that its metrics are off: it is alive.
        if answer.status >= 500 and answer.status != 501:
            self._miss(f"{path} answered {answer.status}")
            return
        self._n_misses = 0
        self._tell_up()
        if answer.status == 200 and from_root:
            self._tell_signals(read_signals(answer.body.decode("utf-8", "replace")))

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

    def _tell_signals(self, values: dict[str, float]) -> None:
        now_s = self._host.now_s()
        if not values or (values == self._told and now_s - self._told_at_s < REPEAT_S):
            return
        self._told, self._told_at_s = values, now_s
        self._host.post(e.SignalsObserved(at_s=now_s, backend_id=self.backend_id, values=values, observed_at_s=now_s))
