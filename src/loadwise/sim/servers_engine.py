"""An M/M/k station behind the engine's interface: k exponential servers and one first-come-first-served queue.

It is the simulator's yardstick: queueing theory knows its mean wait exactly (Erlang C), so a world that gets this
engine wrong gets every engine wrong. A request's first token comes when a server takes it, its last when the server is
done; hence the time to the first token is the wait in the queue.

References: L. Kleinrock, Queueing Systems I (1975), section 3.5; J. D. C. Little, Operations Research 9 (1961).
"""

import heapq
import math

from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams

from .bounds import NUMBER_MAX, RATE_MAX_PER_S, SECONDS_MAX, require_within
from .engine import MAX_WAITING_DEFAULT, EngineRequest, Output, Step


class ServersEngineSpec(Fact, frozen=True, kw_only=True, tag_field="kind", tag="servers"):
    """One entry under `engines:` with `kind: servers`."""

    n_servers: int = 1
    mean_service_s: float = 1.0
    max_waiting: int = MAX_WAITING_DEFAULT

    def __post_init__(self) -> None:
        for name in ("n_servers", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine {name} is {getattr(self, name)!r}; it must be >= 1")
            require_within(f"engine {name}", getattr(self, name), 1, NUMBER_MAX)
        if not (math.isfinite(self.mean_service_s) and self.mean_service_s > 0):
            raise ConfigError(f"engine mean_service_s is {self.mean_service_s!r}; it must be a finite number > 0")
        require_within("engine mean_service_s", self.mean_service_s, 1 / RATE_MAX_PER_S, SECONDS_MAX)


class ServersEngine:
    """See the module. Service times depend on the seed, the engine's name and the request's `luck` only."""

    def __init__(self, spec: ServersEngineSpec, streams: Streams, name: str) -> None:
        self.spec = spec
        self._speed_ratio = 1.0
        self._streams = streams
        self._stream_name = f"service/{name}"
        self._waiting: dict[int, EngineRequest] = {}
        self._serving: dict[int, EngineRequest] = {}
        self._ends: list[tuple[float, int]] = []
        self._busy_s = 0.0
        self._seen_at_s = 0.0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        if len(self._waiting) >= self.spec.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait; the limit is {self.spec.max_waiting}")
        self._waiting[request.request_id] = request

    def cancel(self, request_id: int) -> bool:
        if self._waiting.pop(request_id, None) is not None:
            return True
        return self._serving.pop(request_id, None) is not None

    def set_speed(self, ratio: float) -> None:
        self._speed_ratio = ratio

    def step(self, now_s: float) -> Step:
        outputs: list[Output] = []
        while self._ends and (self._ends[0][0] <= now_s or self._ends[0][1] not in self._serving):
            end_at_s, request_id = heapq.heappop(self._ends)
            request = self._serving.pop(request_id, None)
            if request is not None:
                self._count_busy(end_at_s, was_serving=len(self._serving) + 1)
                self._generation_tokens += request.output_tokens - 1
                outputs.append(Output(request_id, request.output_tokens - 1, is_finished=True))
        self._count_busy(now_s, was_serving=len(self._serving))
        while self._waiting and len(self._serving) < self.spec.n_servers:
            outputs.append(self._take(now_s))
        if not self._ends:
            return Step(0.0, tuple(outputs))
        return Step(max(self._ends[0][0] - now_s, 1e-9), tuple(outputs))

    def signals(self, now_s: float) -> dict[str, float]:
        return {
            "n_running": float(len(self._serving)),
            "n_waiting": float(len(self._waiting)),
            "kv_usage_ratio": len(self._serving) / self.spec.n_servers,
            "prefix_queries_tokens": float(self._prompt_tokens),
            "prefix_hits_tokens": 0.0,
            "n_preemptions": 0.0,
            "prompt_tokens": float(self._prompt_tokens),
            "generation_tokens": float(self._generation_tokens),
            "busy_server_seconds": self._busy_s,
        }

    def check(self) -> None:
        if len(self._serving) > self.spec.n_servers:
            raise LawBroken("L4", f"{len(self._serving)} requests are served by {self.spec.n_servers} servers")
        if self._waiting and len(self._serving) < self.spec.n_servers:
            raise LawBroken("L9", f"{len(self._waiting)} requests wait while a server is free")

    def _take(self, now_s: float) -> Output:
        request_id = next(iter(self._waiting))
        request = self._waiting.pop(request_id)
        service_s = self._streams.at(self._stream_name, request.luck).exponential(self.spec.mean_service_s)
        self._serving[request_id] = request
        self._prompt_tokens += request.prompt_tokens
        self._generation_tokens += 1
        heapq.heappush(self._ends, (now_s + float(service_s) / self._speed_ratio, request_id))
        return Output(request_id, 1, is_first=True)

    def _count_busy(self, now_s: float, *, was_serving: int) -> None:
        self._busy_s += was_serving * max(now_s - self._seen_at_s, 0.0)
        self._seen_at_s = max(now_s, self._seen_at_s)


def erlang_c_wait_s(arrivals_per_s: float, mean_service_s: float, n_servers: int) -> float:
    """Mean wait in the queue of M/M/k, in seconds (Kleinrock 1975, eq. 3.40 with Little's law).

    >>> round(erlang_c_wait_s(0.5, 1.0, 1), 6)
    1.0
    """
    offered = arrivals_per_s * mean_service_s
    if offered >= n_servers:
        return math.inf
    term, total = 1.0, 1.0
    for i in range(1, n_servers):
        term *= offered / i
        total += term
    last = term * offered / n_servers if n_servers > 1 else offered
    p_wait = last / (1 - offered / n_servers)
    p_wait = p_wait / (total + p_wait)
    return p_wait * mean_service_s / (n_servers - offered)
