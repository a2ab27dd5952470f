"""A paid API behind the engine's interface: nobody feels anybody, until a limit is reached.

Each call has its first token after `first_token_s` and then `tokens_per_s`; what others do does not matter to it. Calls
beyond the account's limits are refused with 429 at once, over a sliding minute as providers count: requests when they
arrive, tokens as prompt plus answer. A prefix is cached for `cache_s` from the end of its last use by the program.
"""

import math
from collections import OrderedDict, deque

from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded
from loadwise.kernel.fact import Fact

from .bounds import NUMBER_MAX, RATE_MAX_PER_S, RATE_MIN_PER_S, SECONDS_MAX, require_within
from .engine import ContextTooLong, EngineRequest, Output, Step

WINDOW_S = 60.0
_MAX_PROGRAMS = 100_000


class RateLimited(Overloaded):
    """A limit of the account is reached."""

    status = 429
    code = "rate_limited"


class ApiEngineSpec(Fact, frozen=True, kw_only=True, tag_field="kind", tag="api"):
    """One entry under `engines:` with `kind: api`."""

    first_token_s: float = 0.6
    tokens_per_s: float = 80.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_num_seqs: int = 1000
    """Calls at once; one more is refused with 429."""
    max_model_len: int = 200_000
    cache_s: float = 300.0
    """How long a prefix stays cached; 0 means not at all."""

    def __post_init__(self) -> None:
        for name in ("first_token_s", "tokens_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"engine {name} is {value!r}; it must be a finite number > 0")
        require_within("engine first_token_s", self.first_token_s, 1 / RATE_MAX_PER_S, SECONDS_MAX)
        require_within("engine tokens_per_s", self.tokens_per_s, RATE_MIN_PER_S, RATE_MAX_PER_S)
        require_within("engine cache_s", self.cache_s, 0, SECONDS_MAX)
        for name in ("requests_per_minute", "tokens_per_minute", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine {name} is {value!r}; it must be >= 1")
            require_within(f"engine {name}", value or 1, 1, NUMBER_MAX)


class _Call:
    __slots__ = ("cached_tokens", "n_said", "request", "speed_ratio", "taken_at_s")

    def __init__(self, request: EngineRequest, taken_at_s: float, speed_ratio: float, cached_tokens: int) -> None:
        self.request = request
        self.taken_at_s = taken_at_s
        self.speed_ratio = speed_ratio
        self.cached_tokens = cached_tokens
        self.n_said = 0


class ApiEngine:
    """See the module."""

    def __init__(self, spec: ApiEngineSpec) -> None:
        self.spec = spec
        self._now_s = 0.0
        self._speed_ratio = 1.0
        self._calls: dict[int, _Call] = {}
        self._counted: deque[tuple[float, int]] = deque()
        self._counted_tokens = 0
        self._context: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._query_tokens = self._hit_tokens = self._generation_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1 or total > self.spec.max_model_len:
            raise ContextTooLong(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens; "
                f"each must be >= 1 and both together <= {self.spec.max_model_len}"
            )
        most = self.spec.tokens_per_minute
        if most is not None and total > most:
            raise ContextTooLong(f"request of {total} tokens can never fit; the limit is {most} tokens a minute")
        self._check_limits(total)
        self._counted.append((self._now_s, total))
        self._counted_tokens += total
        cached = self._cached(request)
        self._query_tokens += request.prompt_tokens
        self._hit_tokens += cached
        self._calls[request.request_id] = _Call(request, self._now_s, self._speed_ratio, cached)

    def cancel(self, request_id: int) -> bool:
        return self._calls.pop(request_id, None) is not None

    def set_speed(self, ratio: float) -> None:
        self._speed_ratio = ratio

    def step(self, now_s: float) -> Step:
        self._now_s = now_s
        outputs = [output for call in list(self._calls.values()) if (output := self._say(call)) is not None]
        if not self._calls:
            return Step(0.0, tuple(outputs))
        next_at_s = min(self._due_at_s(call) for call in self._calls.values())
        return Step(max(next_at_s - now_s, 1e-9), tuple(outputs))

    def signals(self, now_s: float) -> dict[str, float]:
        return {
            "n_running": float(len(self._calls)),
            "n_waiting": 0.0,
            "kv_usage_ratio": 0.0,
            "prefix_queries_tokens": float(self._query_tokens),
            "prefix_hits_tokens": float(self._hit_tokens),
            "n_preemptions": 0.0,
            "prompt_tokens": float(self._query_tokens),
            "generation_tokens": float(self._generation_tokens),
        }

    def check(self) -> None:
        if self._counted_tokens != sum(n for _, n in self._counted):
            raise LawBroken("L4", f"the window holds other than {self._counted_tokens} tokens")
        if self.spec.requests_per_minute is not None and len(self._counted) > self.spec.requests_per_minute:
            raise LawBroken("L5", f"{len(self._counted)} requests in a minute; {self.spec.requests_per_minute} may be")

    def _check_limits(self, n_tokens: int) -> None:
        while self._counted and self._counted[0][0] <= self._now_s - WINDOW_S:
            self._counted_tokens -= self._counted.popleft()[1]
        if len(self._calls) >= self.spec.max_num_seqs:
            raise RateLimited(f"{len(self._calls)} calls are open; the limit is {self.spec.max_num_seqs}")
        limit = self.spec.requests_per_minute
        if limit is not None and len(self._counted) >= limit:
            raise RateLimited(f"the limit is {limit} requests a minute", retry_after_s=self._free_after_s(1))
        limit = self.spec.tokens_per_minute
        if limit is not None and self._counted_tokens + n_tokens > limit:
            surplus = self._counted_tokens + n_tokens - limit
            raise RateLimited(f"the limit is {limit} tokens a minute", retry_after_s=self._free_after_s(surplus))

    def _free_after_s(self, n_tokens: int) -> float:
        """Until so many tokens (of at least the oldest call) no longer count in the window."""
        for taken_at_s, n in self._counted:
            n_tokens -= n
            if n_tokens <= 0:
                return max(taken_at_s + WINDOW_S - self._now_s, 0.001)
        return WINDOW_S

    def _cached(self, request: EngineRequest) -> int:
        ended_at_s, n_tokens = self._context.get(request.program_id, (-math.inf, 0))
        if self._now_s - ended_at_s >= self.spec.cache_s:
            return 0
        repeated = request.prompt_tokens if request.prefix_tokens is None else request.prefix_tokens
        return min(n_tokens, repeated, request.prompt_tokens - 1)

    def _token_at_s(self, call: _Call, n: int) -> float:
        """When a call says its n-th token."""
        after_s = self.spec.first_token_s + (n - 1) / self.spec.tokens_per_s
        return call.taken_at_s + after_s / call.speed_ratio

    def _due_at_s(self, call: _Call) -> float:
        return self._token_at_s(call, 1 if call.n_said == 0 else call.request.output_tokens)

    def _say(self, call: _Call) -> Output | None:
        """Tokens that are due by now."""
        request, spec = call.request, self.spec
        since_first_s = (self._now_s - call.taken_at_s) * call.speed_ratio - spec.first_token_s
        n_due = min(math.floor(since_first_s * spec.tokens_per_s + 1e-6) + 1, request.output_tokens)
        n_new = n_due - call.n_said
        if n_new <= 0:
            return None
        is_first = call.n_said == 0
        call.n_said = n_due
        self._generation_tokens += n_new
        is_finished = n_due == request.output_tokens
        if is_finished:
            del self._calls[request.request_id]
            self._context[request.program_id] = (self._now_s, request.prompt_tokens + request.output_tokens)
            self._context.move_to_end(request.program_id)
            if len(self._context) > _MAX_PROGRAMS:
                self._context.popitem(last=False)
        return Output(request.request_id, n_new, is_first, is_finished, call.cached_tokens)
