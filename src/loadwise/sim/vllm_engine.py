"""vLLM V1 in virtual time, block by block: the reference against which everything faster is measured.

The scheduler (`scheduler`), the blocks (`kv_cache`, `kv_blocks`) and the duration of a step (`step_time`) are separate;
this module moves them through the driver's time. While no prompt is read and nobody can enter, steps differ only by the
KV that has grown, so they are planned as one macro-step. Its blocks are taken when its real length is known: at its
end, when the driver calls early, or when somebody comes or goes, which ends it with the step in progress. Until then no
block is looked up or freed, so the result is that of single steps (law, tested).
"""

from typing import Literal

from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded
from loadwise.kernel.fact import Fact

from .bounds import NUMBER_MAX, TOKENS_MAX, require_within
from .content import Contents
from .engine import MAX_WAITING_DEFAULT, ContextTooLong, EngineRequest, Output, Step
from .hardware import HardwareSpec
from .kv_arena import ArenaPool
from .kv_blocks import BlockPool
from .kv_cache import MAX_STATE_GROUPS, KvCache
from .scheduler import Call, Plan, Scheduler
from .step_time import StepCost, StepRun


class VllmEngineSpec(Fact, frozen=True, kw_only=True, tag_field="kind", tag="vllm"):
    """One entry under `engines:` with `kind: vllm`. Settings that vLLM has, too, bear vLLM's names."""

    hardware: HardwareSpec | None = None
    """GPU, model and precision, from which the next four follow where they are not given."""
    num_gpu_blocks: int | None = None
    """KV blocks, as vLLM logs them at its start and exports them in `vllm:cache_config_info`."""
    block_size: int | None = None
    """Tokens of a block; hybrid models have larger ones (Qwen3.6-27B: 784)."""
    n_state_groups: int | None = None
    """Groups of linear-attention layers (Qwen3.5 and Qwen3.6: 3); 0 for pure attention."""
    step: StepCost | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step; 0 means no limit but the batch's."""
    scheduler_reserve_full_isl: bool = True
    """A request enters only if its whole prompt fits, not only its first chunk."""
    watermark_ratio: float = 0.0
    """Share of blocks that stays free when a request enters while others run."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_model_len: int | None = None
    """Longest prompt and answer together; the KV is a limit in any case."""
    has_prefix_cache: bool = True
    max_waiting: int = MAX_WAITING_DEFAULT

    def __post_init__(self) -> None:
        for name in ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine {name} is {value!r}; it must be >= 1")
            most = TOKENS_MAX if name == "num_gpu_blocks" else NUMBER_MAX  # every block is an object
            require_within(f"engine {name}", value or 1, 1, most)
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"engine long_prefill_token_threshold is {self.long_prefill_token_threshold!r}; it must be >= 0"
            )
        if not 0 <= self.state_groups <= MAX_STATE_GROUPS:
            raise ConfigError(f"engine n_state_groups is {self.n_state_groups!r}; it must be in 0..{MAX_STATE_GROUPS}")
        if not 0 <= self.watermark_ratio < 1:
            raise ConfigError(f"engine watermark_ratio is {self.watermark_ratio!r}; it must be in [0, 1)")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"engine max_model_len is {self.max_model_len!r}; it must be >= 2")
        self._check_chunks()

    def _check_chunks(self) -> None:
        most = self.long_prefill_token_threshold or self.max_num_batched_tokens
        if self.state_groups and self.has_prefix_cache and min(most, self.max_num_batched_tokens) < self.block_tokens:
            raise ConfigError(
                f"engine reads at most {most} prompt tokens a step; with checkpoints of state every "
                f"block_size = {self.block_tokens} tokens it must be at least that"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: given, the hardware's, or 16."""
        if self.block_size is not None:
            return self.block_size
        return 16 if self.hardware is None else self.hardware.model_facts.block_size

    @property
    def n_blocks(self) -> int:
        """KV blocks: given, what the hardware holds, or 20,000."""
        if self.num_gpu_blocks is not None:
            return self.num_gpu_blocks
        return 20_000 if self.hardware is None else self.hardware.kv_tokens // self.block_tokens

    @property
    def state_groups(self) -> int:
        """Groups of linear-attention layers: given, the model's, or none."""
        if self.n_state_groups is not None:
            return self.n_state_groups
        return 0 if self.hardware is None else self.hardware.model_facts.n_state_groups

    @property
    def cost(self) -> StepCost:
        """What a step costs: given, the hardware's, or that of an 8B model on a fast GPU."""
        if self.step is not None:
            return self.step
        return StepCost() if self.hardware is None else self.hardware.step

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit if nobody rounds up and nobody holds states."""
        return self.n_blocks * self.block_tokens


def check_fits(request: EngineRequest, spec: VllmEngineSpec, cache: KvCache, n_blocks: int) -> None:
    """Refuse what could never run, whatever else runs.

    Raises:
        ContextTooLong: the request is empty, longer than the model's context, or needs more than `n_blocks` blocks.
    """
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise ContextTooLong(
            f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens; each must be >= 1"
        )
    total = request.prompt_tokens + request.output_tokens
    if spec.max_model_len is not None and total > spec.max_model_len:
        raise ContextTooLong(f"request needs {total} tokens; max_model_len is {spec.max_model_len}")
    needed = cache.most_blocks(total - 1)
    if needed > n_blocks:
        raise ContextTooLong(f"request of {total} tokens needs {needed} blocks; this engine has {n_blocks}")


class VllmEngine:
    """See the module."""

    def __init__(
        self, spec: VllmEngineSpec, *, has_macro_steps: bool = True, shared_pool: ArenaPool | None = None
    ) -> None:
        """
        Args:
            shared_pool: Blocks in a memory that other engines use as well. Macro-steps would plan with memory that
                another may take meanwhile, so every step is then taken by itself.
        """
        self.spec = spec
        self._shared_pool = shared_pool
        pool = BlockPool(spec.n_blocks) if shared_pool is None else shared_pool
        has_macro_steps = has_macro_steps and shared_pool is None
        self.cache = KvCache(pool, spec.block_tokens, spec.state_groups, has_prefix_cache=spec.has_prefix_cache)
        self._cost = spec.cost
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            long_prefill_token_threshold=spec.long_prefill_token_threshold,
            reserve_full_isl=spec.scheduler_reserve_full_isl,
            watermark_blocks=int(spec.watermark_ratio * spec.n_blocks),
            policy=spec.scheduling_policy,
        )
        self._has_macro_steps = has_macro_steps
        self._contents = Contents(spec.block_tokens, 2 * spec.n_blocks)
        self._calls: dict[int, Call] = {}
        self._n_arrived = 0
        self._speed_ratio = 1.0
        self._plan: Plan | None = None
        self._began_at_s = 0.0
        self._run = StepRun(0.0, 0.0, 0)
        self._is_scheduled = False
        """The tokens of the step in progress are handed out; later steps of a macro-step are not yet."""
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        check_fits(request, self.spec, self.cache, self.cache.pool.n_blocks)
        if len(self.scheduler.waiting) >= self.spec.max_waiting:
            raise Overloaded(f"{len(self.scheduler.waiting)} requests wait; the limit is {self.spec.max_waiting}")
        if not self.scheduler.stays_quiet(self._plan):
            self._end_macro_step()
        self._n_arrived += 1
        call = Call(request, self._contents.open(request), self._n_arrived, self.cache.n_state_groups)
        self._calls[request.request_id] = call
        self.scheduler.waiting.add(call)

    def cancel(self, request_id: int) -> bool:
        call = self._calls.get(request_id)
        if call is None:
            return False
        self._end_macro_step()
        del self._calls[request_id]
        if call in self.scheduler.running:
            call.is_gone = True
            self.scheduler.leave(call)
        else:
            self.scheduler.waiting.forget(call)
        self._contents.close(call.request, call.n_tokens)
        return True

    def set_speed(self, ratio: float) -> None:
        self._end_macro_step()
        self._speed_ratio = ratio

    def step(self, now_s: float) -> Step:
        outputs: tuple[Output, ...] = ()
        if self._plan is not None:
            n_done = self._run.n_done(now_s - self._began_at_s)
            if n_done:
                outputs = self._commit(self._plan, n_done)
            if self._run.n_steps:
                # Never 0, which would mean idle: a driver may be a rounding error short of the end.
                left_s = self._began_at_s + self._run.until_s(self._run.n_steps) - now_s
                return Step(max(left_s, 1e-6 * self._run.first_s), outputs)
        self._begin(now_s)
        return Step(self._run.until_s(self._run.n_steps) if self._plan is not None else 0.0, outputs)

    def until_token_s(self, now_s: float) -> float:
        """Seconds until the step in progress ends, whose tokens a driver that streams may then fetch; 0 when idle."""
        if self._plan is None or not self._run.n_steps:
            return 0.0
        left_s = self._began_at_s + self._run.until_s(1) - now_s
        return max(left_s, 1e-6 * self._run.first_s)

    def signals(self, now_s: float) -> dict[str, float]:
        scheduler, pool = self.scheduler, self.cache.pool
        n_held = pool.n_blocks - pool.n_free + self._n_unscheduled_blocks(now_s)
        return {
            "n_running": float(len(scheduler.running)),
            "n_waiting": float(len(scheduler.waiting)),
            "kv_usage_ratio": n_held / pool.n_blocks,
            "prefix_queries_tokens": float(scheduler.query_tokens),
            "prefix_hits_tokens": float(scheduler.hit_tokens),
            "n_preemptions": float(scheduler.n_preemptions),
            "prompt_tokens": float(self._prompt_tokens),
            "generation_tokens": float(self._generation_tokens),
        }

    def decoding_tokens(self) -> int:
        """Computed tokens of all that decode, as of the last step that was told."""
        return sum(call.n_computed for call in self.scheduler.running if call.n_said)

    def check(self) -> None:
        held: dict[int, int] = {}
        for call in self.scheduler.running:
            for block in call.held.blocks():
                held[block] = held.get(block, 0) + 1
        self.cache.pool.check(held)
        n_running, n_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        if n_running + n_waiting != len(self._calls):
            raise LawBroken("L1", f"{len(self._calls)} requests are open, {n_running} run and {n_waiting} wait")
        if n_running > self.spec.max_num_seqs:
            raise LawBroken("L4", f"{n_running} requests run, max_num_seqs is {self.spec.max_num_seqs}")

    def _begin(self, now_s: float) -> None:
        """Schedule the next step, if there is work."""
        self._plan = None
        self._run = StepRun(0.0, 0.0, 0)
        # A step may preempt its only request (by priority), but never twice in a row without end.
        for _ in range(len(self._calls) + 1):
            if not self._calls:
                return
            plan = self.scheduler.schedule()
            if plan.calls:
                break
        else:
            if self._shared_pool is not None and self._shared_pool.is_starved:
                return  # until another engine gives memory back
            raise LawBroken("L9", f"{len(self._calls)} requests are open and none of them can be scheduled")
        n_steps = self.scheduler.quiet_steps(plan) if self._has_macro_steps else 1
        run = self._cost.steps(plan.batch, n_steps)
        self._run = StepRun(run.first_s / self._speed_ratio, run.growth_s / self._speed_ratio, run.n_steps)
        self._plan = plan
        self._began_at_s = now_s
        self._is_scheduled = True

    def _end_macro_step(self) -> None:
        """Only the step in progress is carried out; its tokens are handed out now, if they were not."""
        if self._plan is None or not self._run.n_steps:
            return
        if not self._is_scheduled:
            self.scheduler.extend(self._plan, 1)
            self._is_scheduled = True
        self._run = StepRun(self._run.first_s, self._run.growth_s, 1)

    def _commit(self, plan: Plan, n_steps: int) -> tuple[Output, ...]:
        n_more = n_steps - 1 if self._is_scheduled else n_steps
        if n_more:
            self.scheduler.extend(plan, n_more)
        self._is_scheduled = False
        self._began_at_s += self._run.until_s(n_steps)
        self._run = self._run.after(n_steps)
        said = [
            self._say(call, n_steps)
            for call in plan.calls
            if not call.is_gone and call.n_computed == call.n_tokens + n_steps - 1
        ]
        return tuple(said)

    def _say(self, call: Call, n_tokens: int) -> Output:
        is_first = call.n_said == 0
        if is_first:
            self._prompt_tokens += call.request.prompt_tokens
        call.n_said += n_tokens
        call.n_tokens += n_tokens
        self._generation_tokens += n_tokens
        is_finished = call.n_left == 0
        if is_finished:
            del self._calls[call.request.request_id]
            self.scheduler.leave(call)
            self._contents.close(call.request, call.n_tokens)
        return Output(call.request.request_id, n_tokens, is_first, is_finished, call.cached_tokens or 0)

    def _n_unscheduled_blocks(self, now_s: float) -> int:
        """Blocks that steps of a macro-step have taken by now, though this is not yet written down."""
        if self._plan is None or not self._run.n_steps:
            return 0
        n_begun = min(self._run.n_done(now_s - self._began_at_s) + 1, self._run.n_steps)
        n_more = n_begun - 1 if self._is_scheduled else n_begun
        return self.scheduler.blocks_for(self._plan, n_more) if n_more else 0
