"""A continuous-batching engine in few words: slots, two token rates, KV tokens and a prefix cache per program.

Theory of operation. Time passes in engine steps. Each step gives one token to every decoding request and up to
`prefill_chunk_tokens` prompt tokens to requests that are still reading, first come first served. A step lasts

    seconds = prefill_tokens / prefill_tokens_per_s                         (0 without prefill)
            + (1 + batch_slowdown_ratio * (n_decoding - 1)) / decode_steps_per_s    (0 without decoding)

divided by the speed ratio. A request enters when a slot is free and its prompt plus one token fits into the KV tokens;
the queue is first come first served, so its head alone is tried. Idle caches of programs are evicted in LRU order
before anything is refused. When growth does not fit, the request admitted last is preempted: it loses its KV, goes to
the head of the queue and reads its prompt and its own output again. A finished or cancelled request leaves its context
as its program's cache; a later request of the program hits the longest common part but at least one token less than
its prompt, because the last token must be computed to predict the next.

While nobody reads and nobody can enter, all steps are alike until the next request finishes or the KV is full: they
are planned as one macro-step, and taken apart again when the driver calls early. Single steps give the same result.
The later, exact vLLM scheduler replaces this body behind the same interface. Not modelled here: blocks (a token is
the unit), prefixes shared between programs, priorities.
"""

import math
from collections.abc import Iterable

from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded
from loadwise.kernel.fact import Fact

from .bounds import NUMBER_MAX, RATE_MAX_PER_S, RATE_MIN_PER_S, require_within
from .engine import MAX_WAITING_DEFAULT, ContextTooLong, EngineRequest, Output, Step

_STEP_TOLERANCE = 1e-6
"""Fraction of a step by which a driver's sum of floats may fall short of the step's end."""


class SimpleEngineSpec(Fact, frozen=True, kw_only=True, tag_field="kind", tag="simple"):
    """One entry under `engines:` with `kind: simple`."""

    slots: int = 64
    """Most requests running at once."""
    prefill_tokens_per_s: float = 20_000.0
    decode_steps_per_s: float = 50.0
    """Steps (= tokens of each request) per second at batch one."""
    batch_slowdown_ratio: float = 0.01
    """How much longer a decode step becomes with each further request."""
    kv_tokens: int = 200_000
    prefill_chunk_tokens: int = 4096
    """Most prompt tokens in one step."""
    has_prefix_cache: bool = True
    max_waiting: int = MAX_WAITING_DEFAULT

    def __post_init__(self) -> None:
        for name in ("slots", "kv_tokens", "prefill_chunk_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine {name} is {getattr(self, name)!r}; it must be >= 1")
            require_within(f"engine {name}", getattr(self, name), 1, NUMBER_MAX)
        for name in ("prefill_tokens_per_s", "decode_steps_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"engine {name} is {value!r}; it must be a finite number > 0")
            require_within(f"engine {name}", value, RATE_MIN_PER_S, RATE_MAX_PER_S)
        require_within("engine batch_slowdown_ratio", self.batch_slowdown_ratio, 0, NUMBER_MAX)


class _Call:
    """A request and what the engine has done for it."""

    __slots__ = ("cached_tokens", "is_gone", "kv_tokens", "n_out", "request", "unread_tokens")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.n_out = 0
        self.unread_tokens = 0
        self.kv_tokens = 0
        self.cached_tokens = 0
        self.is_gone = False

    @property
    def computed_tokens(self) -> int:
        """Context whose keys and values exist."""
        return self.request.prompt_tokens + self.n_out - self.unread_tokens


class _Plan:
    """Equal steps under way: who decodes, who reads how much, since when."""

    __slots__ = ("began_at_s", "decoding", "is_disturbed", "n_steps", "reading", "step_s")

    def __init__(
        self, began_at_s: float, step_s: float, n_steps: int, decoding: list[_Call], reading: list[tuple[_Call, int]]
    ) -> None:
        self.began_at_s = began_at_s
        self.step_s = step_s
        self.n_steps = n_steps
        self.decoding = decoding
        self.reading = reading
        self.is_disturbed = False

    def n_done(self, now_s: float) -> int:
        """Whole steps finished by `now_s`."""
        n = math.floor((now_s - self.began_at_s) / self.step_s + _STEP_TOLERANCE)
        return min(max(n, 0), self.n_steps)


class SimpleEngine:
    """See the module."""

    def __init__(self, spec: SimpleEngineSpec) -> None:
        self.spec = spec
        self._speed_ratio = 1.0
        self._waiting: dict[int, _Call] = {}
        self._preempted: list[_Call] = []
        self._running: dict[int, _Call] = {}
        self._held_tokens = 0
        self._cache: dict[str, int] = {}
        self._cache_tokens = 0
        self._plan: _Plan | None = None
        self._n_preemptions = 0
        self._query_tokens = 0
        self._hit_tokens = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ContextTooLong(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens; each must be >= 1"
            )
        total = request.prompt_tokens + request.output_tokens
        if total > self.spec.kv_tokens:
            raise ContextTooLong(f"request needs {total} tokens; this engine's limit is {self.spec.kv_tokens}")
        if len(self._waiting) + len(self._preempted) >= self.spec.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait; the limit is {self.spec.max_waiting}")
        self._waiting[request.request_id] = _Call(request)
        self._disturb()

    def cancel(self, request_id: int) -> bool:
        if self._waiting.pop(request_id, None) is not None:
            return True
        for i, call in enumerate(self._preempted):
            if call.request.request_id == request_id:
                del self._preempted[i]
                return True
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        running.is_gone = True
        self._leave(running, running.computed_tokens)
        self._disturb()
        return True

    def set_speed(self, ratio: float) -> None:
        self._speed_ratio = ratio
        self._disturb()

    def step(self, now_s: float) -> Step:
        outputs: tuple[Output, ...] = ()
        plan = self._plan
        if plan is not None:
            n_done = plan.n_done(now_s)
            if n_done:
                outputs = tuple(self._commit(plan, n_done))
            if plan.n_steps:
                if plan.is_disturbed:
                    plan.n_steps = 1
                    plan.is_disturbed = False
                end_at_s = plan.began_at_s + plan.n_steps * plan.step_s
                return Step(max(end_at_s - now_s, _STEP_TOLERANCE * plan.step_s), outputs)
        self._plan = self._make_plan(now_s)
        return Step(0.0 if self._plan is None else self._plan.n_steps * self._plan.step_s, outputs)

    def signals(self, now_s: float) -> dict[str, float]:
        grown = 0 if self._plan is None else self._plan.n_done(now_s) * len(self._plan.decoding)
        return {
            "n_running": float(len(self._running)),
            "n_waiting": float(len(self._waiting) + len(self._preempted)),
            "kv_usage_ratio": min((self._held_tokens + grown) / self.spec.kv_tokens, 1.0),
            "prefix_queries_tokens": float(self._query_tokens),
            "prefix_hits_tokens": float(self._hit_tokens),
            "n_preemptions": float(self._n_preemptions),
            "prompt_tokens": float(self._prompt_tokens),
            "generation_tokens": float(self._generation_tokens),
        }

    def check(self) -> None:
        held = sum(call.kv_tokens for call in self._running.values())
        if held != self._held_tokens:
            raise LawBroken("L4", f"running requests hold {held} KV tokens, the engine counts {self._held_tokens}")
        if self._cache_tokens != sum(self._cache.values()):
            raise LawBroken("L4", f"caches hold {sum(self._cache.values())} tokens, counted {self._cache_tokens}")
        if self._held_tokens + self._cache_tokens > self.spec.kv_tokens:
            raise LawBroken(
                "L4", f"{self._held_tokens} held and {self._cache_tokens} cached exceed {self.spec.kv_tokens} KV tokens"
            )
        if len(self._running) > self.spec.slots:
            raise LawBroken("L4", f"{len(self._running)} requests run in {self.spec.slots} slots")

    def _disturb(self) -> None:
        if self._plan is not None:
            self._plan.is_disturbed = True

    def _make_plan(self, now_s: float) -> _Plan | None:
        n_preemptions = self._n_preemptions
        decoding = self._with_room_to_grow()
        has_preempted = self._n_preemptions > n_preemptions
        if not has_preempted:
            self._admit(len(decoding))
        reading = self._reading()
        if not decoding and not reading:
            return None
        prefill_tokens = sum(n for _, n in reading)
        step_s = prefill_tokens / self.spec.prefill_tokens_per_s
        if decoding:
            slow = 1.0 + self.spec.batch_slowdown_ratio * (len(decoding) - 1)
            step_s += slow / self.spec.decode_steps_per_s
        n_steps = 1
        if not reading and not has_preempted:
            room = (self.spec.kv_tokens - self._held_tokens) // len(decoding)
            n_steps = min(min(call.request.output_tokens - call.n_out for call in decoding), room)
        return _Plan(now_s, step_s / self._speed_ratio, n_steps, decoding, reading)

    def _with_room_to_grow(self) -> list[_Call]:
        """Who decodes next, each with room for one more token; those admitted last are preempted for it."""
        decoding = [call for call in self._running.values() if not call.unread_tokens]
        while self._held_tokens + len(decoding) > self.spec.kv_tokens:
            _, victim = self._running.popitem()
            self._held_tokens -= victim.kv_tokens
            victim.kv_tokens = 0
            if not victim.unread_tokens:
                decoding.remove(victim)
            self._n_preemptions += 1
            self._preempted.append(victim)
        return decoding

    def _admit(self, n_decoding: int) -> None:
        while (self._preempted or self._waiting) and len(self._running) < self.spec.slots:
            call = self._preempted[-1] if self._preempted else next(iter(self._waiting.values()))
            needed = call.request.prompt_tokens + call.n_out + 1
            if self._held_tokens + needed + n_decoding > self.spec.kv_tokens and self._running:
                return
            if self._preempted:
                self._preempted.pop()
            else:
                del self._waiting[call.request.request_id]
            self._enter(call, needed)

    def _enter(self, call: _Call, needed_tokens: int) -> None:
        request = call.request
        hit = self._take_cache(request) if self.spec.has_prefix_cache else 0
        if call.n_out == 0:
            call.cached_tokens = hit
            self._prompt_tokens += request.prompt_tokens
        self._query_tokens += request.prompt_tokens
        self._hit_tokens += hit
        call.unread_tokens = request.prompt_tokens + call.n_out - hit
        call.kv_tokens = needed_tokens
        self._held_tokens += needed_tokens
        self._running[request.request_id] = call
        self._evict()

    def _take_cache(self, request: EngineRequest) -> int:
        cached = self._cache.pop(request.program_id, 0)
        self._cache_tokens -= cached
        if request.prefix_tokens is not None:
            cached = min(cached, request.prefix_tokens)
        return min(cached, request.prompt_tokens - 1)

    def _reading(self) -> list[tuple[_Call, int]]:
        budget = self.spec.prefill_chunk_tokens
        reading: list[tuple[_Call, int]] = []
        for call in self._running.values():
            if call.unread_tokens and budget:
                n = min(call.unread_tokens, budget)
                reading.append((call, n))
                budget -= n
        return reading

    def _commit(self, plan: _Plan, n_steps: int) -> Iterable[Output]:
        plan.n_steps -= n_steps
        plan.began_at_s += n_steps * plan.step_s
        if not plan.n_steps:
            self._plan = None
        outputs = []
        for call in plan.decoding:
            if not call.is_gone:
                call.kv_tokens += n_steps
                self._held_tokens += n_steps
                outputs.append(self._say(call, n_steps))
        for call, n in plan.reading:
            if not call.is_gone:
                call.unread_tokens -= n
                if not call.unread_tokens:
                    outputs.append(self._say(call, 1))
        self._evict()
        return outputs

    def _say(self, call: _Call, n_tokens: int) -> Output:
        is_first = call.n_out == 0
        call.n_out += n_tokens
        self._generation_tokens += n_tokens
        is_finished = call.n_out >= call.request.output_tokens
        if is_finished:
            del self._running[call.request.request_id]
            self._leave(call, call.computed_tokens)
        return Output(call.request.request_id, n_tokens, is_first, is_finished, call.cached_tokens)

    def _leave(self, call: _Call, context_tokens: int) -> None:
        """Free a call's KV; what was computed stays as its program's idle cache."""
        self._held_tokens -= call.kv_tokens
        call.kv_tokens = 0
        if not self.spec.has_prefix_cache:
            return
        previous = self._cache.pop(call.request.program_id, 0)
        kept = max(previous, context_tokens)
        self._cache[call.request.program_id] = kept
        self._cache_tokens += kept - previous
        self._evict()

    def _evict(self) -> None:
        while self._cache_tokens + self._held_tokens > self.spec.kv_tokens:
            program_id = next(iter(self._cache))
            self._cache_tokens -= self._cache.pop(program_id)
