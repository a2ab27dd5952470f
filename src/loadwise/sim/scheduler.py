"""vLLM V1's scheduler (`v1/core/sched/scheduler.py`): who computes how many tokens in the next step.

There is no prefill and no decode. Every request has computed some of its tokens and wants to catch up with all of
them; a step hands out at most `max_num_batched_tokens`. Those that run are served first, in their order; whoever finds
no blocks preempts from the tail (or the least urgent, by priority) until there are some or it was its own turn. A
preempted request loses everything it computed, keeps what it said, and goes to the head of the queue. New requests
enter only in steps that preempted nobody, in order, and the first that does not fit stops all behind it. Not modelled:
speculative decoding, LoRA, remote KV, structured output.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Literal

from loadwise.kernel.errors import LawBroken

from .content import Line
from .engine import EngineRequest
from .kv_cache import Held, KvCache
from .step_time import Batch


class Call:
    """A request and what the engine has done for it."""

    __slots__ = (
        "cached_tokens",
        "held",
        "is_gone",
        "junction_tokens",
        "line",
        "n_computed",
        "n_new",
        "n_preemptions",
        "n_said",
        "n_tokens",
        "order",
        "request",
    )

    def __init__(self, request: EngineRequest, line: Line, order: int, n_state_groups: int) -> None:
        self.request = request
        self.line = line
        self.order = order
        self.held = Held(n_state_groups)
        self.n_tokens = request.prompt_tokens
        """Prompt and what was said: what has to be computed before the next token."""
        self.n_computed = 0
        self.n_said = 0
        self.n_new = 0
        """Tokens it was given in the step under way."""
        self.n_preemptions = 0
        self.junction_tokens = 0
        """Where a hybrid model's attention is cached, but no state: worth a checkpoint when it gets there."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the cache when it was first scheduled."""
        self.is_gone = False

    @property
    def n_left(self) -> int:
        """Tokens it has yet to say."""
        return self.request.output_tokens - self.n_said


class Queue:
    """Requests that wait: first come first served, or by priority and then by arrival."""

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._is_fcfs = policy == "fcfs"
        self._line: deque[Call] = deque()
        self._heap: list[tuple[int, int, Call]] = []
        self._n_gone = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._heap) - self._n_gone

    def __iter__(self) -> Iterator[Call]:
        if self._is_fcfs:
            return iter([call for call in self._line if not call.is_gone])
        return iter([call for _, _, call in sorted(self._heap) if not call.is_gone])

    def add(self, call: Call) -> None:
        """At the end."""
        if self._is_fcfs:
            self._line.append(call)
        else:
            heapq.heappush(self._heap, (call.request.priority, call.order, call))

    def add_preempted(self, call: Call) -> None:
        """At the head; by priority, where it belongs."""
        if self._is_fcfs:
            self._line.appendleft(call)
        else:
            self.add(call)

    def head(self) -> Call | None:
        """Whose turn it is."""
        while self._n_gone and (self._line or self._heap):
            call = self._line[0] if self._is_fcfs else self._heap[0][2]
            if not call.is_gone:
                return call
            self.pop()
            self._n_gone -= 1
        if self._is_fcfs:
            return self._line[0] if self._line else None
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """The head leaves."""
        if self._is_fcfs:
            self._line.popleft()
        else:
            heapq.heappop(self._heap)

    def forget(self, call: Call) -> None:
        """A request that waits will not be served."""
        call.is_gone = True
        self._n_gone += 1


class Plan:
    """What one step does."""

    __slots__ = ("batch", "calls", "has_preempted", "is_quiet")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.batch = Batch()
        self.has_preempted = False
        self.is_quiet = False
        """The next step will be of the same kind, unless somebody arrives, finishes, or finds no block."""


class Scheduler:
    """See the module."""

    def __init__(
        self,
        cache: KvCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        reserve_full_isl: bool = True,
        watermark_blocks: int = 0,
        policy: Literal["fcfs", "priority"] = "fcfs",
    ) -> None:
        self.cache = cache
        self.waiting = Queue(policy)
        self.running: list[Call] = []
        self.n_preemptions = 0
        self.query_tokens = 0
        self.hit_tokens = 0
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._most_new_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self._most_now = self._most_new_tokens
        self._reserve_full_isl = reserve_full_isl
        self._watermark_blocks = watermark_blocks

    def schedule(self) -> Plan:
        """Hand out the tokens of one step; they count as computed from now on, as in vLLM."""
        plan = Plan()
        self.cache.begin_step()
        # A request that is alone starves nobody, so it may read as much as it likes.
        is_alone = len(self.running) + len(self.waiting) <= 1
        self._most_now = self._max_num_batched_tokens if is_alone else self._most_new_tokens
        budget = self._schedule_running(plan)
        is_stopped = plan.has_preempted or self._schedule_waiting(plan, budget)
        for call in plan.calls:
            is_decode = call.n_new == 1 and call.n_said > 0
            plan.batch.add(call.n_computed, call.n_new, is_decode=is_decode)
            call.n_computed += call.n_new
        plan.is_quiet = (
            not plan.has_preempted
            and not plan.batch.n_prefill
            and len(plan.calls) == len(self.running)
            and (not len(self.waiting) or is_stopped or len(self.running) >= self._max_num_seqs)
        )
        return plan

    def quiet_steps(self, plan: Plan) -> int:
        """How many steps like this one (itself included) will follow if nobody comes or goes; >= 1."""
        if not plan.is_quiet:
            return 1
        most = min(call.n_left for call in plan.calls)
        if self.cache.n_state_groups:
            return max(min([most, *(self._steps_in_block(call) for call in plan.calls)]), 1)
        least = 1
        while least < most:
            n = (least + most + 1) // 2
            if self.blocks_for(plan, n - 1) <= self.cache.pool.n_free:
                least = n
            else:
                most = n - 1
        return least

    def stays_quiet(self, plan: Plan | None) -> bool:
        """Whether a step goes on as planned if one more request arrives: it could not enter before the next."""
        if plan is None or not plan.is_quiet or self._policy != "fcfs":
            return False
        return len(self.waiting) > 0 or len(self.running) >= self._max_num_seqs

    def extend(self, plan: Plan, n_steps: int) -> None:
        """Schedule `n_steps` more steps like a quiet one, at once."""
        for call in plan.calls:
            if not self._grow(call, call.n_computed, n_steps):
                raise LawBroken("L4", f"a quiet step found no block among {self.cache.pool.n_free} free ones")
            call.n_computed += n_steps

    def leave(self, call: Call) -> None:
        """A running request ends; its blocks are free at once."""
        self.running.remove(call)
        self.cache.give_back(call.held)

    def _steps_in_block(self, call: Call) -> int:
        """Steps until a hybrid request's states move, this one included."""
        if call.held.n_states > 1:
            return 1
        return len(call.held.attention) * self.cache.block_size - call.n_computed + 1

    def blocks_for(self, plan: Plan, n_more_tokens: int) -> int:
        """Blocks that so many more tokens of each request of a plan would take."""
        return sum(
            max(self.cache.blocks_of(call.n_computed + n_more_tokens) - len(call.held.attention), 0)
            for call in plan.calls
        )

    def _schedule_running(self, plan: Plan) -> int:
        budget = self._max_num_batched_tokens
        i = 0
        while i < len(self.running) and budget > 0:
            call = self.running[i]
            n_new = self._n_new(call, call.n_computed, budget)
            if n_new == 0:
                i += 1
                continue
            while not self._grow(call, call.n_computed, n_new):
                victim = self._victim()
                if victim in plan.calls:
                    plan.calls.remove(victim)
                    budget += victim.n_new
                    self.cache.unname_after(victim.held, victim.n_computed)
                    i -= 1
                self._preempt(victim, plan)
                if victim is call:
                    return budget
            call.n_new = n_new
            plan.calls.append(call)
            budget -= n_new
            i += 1
        return budget

    def _victim(self) -> Call:
        if self._policy == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda call: (call.request.priority, call.order))

    def _preempt(self, call: Call, plan: Plan) -> None:
        self.running.remove(call)
        self.cache.give_back(call.held)
        call.n_computed = 0
        call.n_preemptions += 1
        self.n_preemptions += 1
        self.waiting.add_preempted(call)
        plan.has_preempted = True

    def _schedule_waiting(self, plan: Plan, budget: int) -> bool:
        """Let requests in. True if the head finds no room and will not before somebody leaves."""
        while budget > 0 and len(self.running) < self._max_num_seqs:
            call = self.waiting.head()
            if call is None:
                return False
            hit = self.cache.find(call.line, call.n_tokens)
            n_hit = len(hit.attention) * self.cache.block_size
            call.junction_tokens = (
                hit.n_attention * self.cache.block_size if hit.n_attention > len(hit.attention) else 0
            )
            n_new = self._n_new(call, n_hit, budget)
            if n_new == 0 or hit.is_fresh:
                return False
            n_tokens = call.n_tokens if self._reserve_full_isl else n_hit + n_new
            watermark = self._watermark_blocks if self.running else 0
            if self.cache.n_needed(hit, n_tokens) + watermark > self.cache.pool.n_free:
                return True
            self.waiting.pop()
            self.cache.enter(call.held, hit)
            if not self._grow(call, n_hit, n_new):
                raise LawBroken("L4", "a request that fits found no block")
            self._count_hit(call, n_hit)
            call.n_computed = n_hit
            call.n_new = n_new
            self.running.append(call)
            plan.calls.append(call)
            budget -= n_new
        return False

    def _count_hit(self, call: Call, n_hit: int) -> None:
        if call.cached_tokens is None:
            call.cached_tokens = n_hit
            self.query_tokens += call.n_tokens
            self.hit_tokens += n_hit

    def _n_new(self, call: Call, n_computed: int, budget: int) -> int:
        n_new = min(call.n_tokens - n_computed, self._most_now, budget)
        is_prefill = n_computed < max(call.request.prompt_tokens, call.n_tokens - 1)
        if self.cache.n_state_groups and self.cache.has_prefix_cache and is_prefill:
            return self._cut_at_block(call, n_computed, n_computed + n_new)
        return n_new

    def _cut_at_block(self, call: Call, begin: int, end: int) -> int:
        """A hybrid model's chunk ends where its state can be a checkpoint (`_mamba_block_aligned_split`)."""
        size = self.cache.block_size
        if end < max(call.request.prompt_tokens, call.n_tokens - 1):
            aligned = end // size * size
            if aligned > begin or size <= self._most_new_tokens:
                end = aligned
        stops = [(call.n_tokens - 1) // size * size, call.junction_tokens]
        if begin % size:
            stops.append((begin // size + 1) * size)
        return max(min([stop for stop in stops if begin < stop < end], default=end) - begin, 0)

    def _grow(self, call: Call, n_computed: int, n_new: int) -> bool:
        checkpoint = (call.request.prompt_tokens - 1) // self.cache.block_size
        return self.cache.grow(call.held, call.line, n_computed, n_new, checkpoint)
