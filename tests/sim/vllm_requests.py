"""Requests with real tokens, so that what an engine claims to know can be compared with what was said."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from loadwise.sim.engine import EngineRequest
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngineSpec

SYSTEM_TOKENS = 40
QUICK = StepCost(
    fixed_s=0.01, weights_s=0.02, gemm_s_per_token=1e-4, kv_s_per_token=1e-6, attention_s_per_pair=1e-7, request_s=1e-3
)


class Ask(NamedTuple):
    """One turn of a program, before its length is known."""

    program: str
    growth: int
    output: int
    after_s: float = 0.0
    """Since the previous turn of any program."""
    keep: float = 1.0
    """Share of the program's context that it repeats."""
    cancel_after_s: float | None = None
    priority: int = 0


class Script(NamedTuple):
    """What to drive an engine with, and the tokens behind it."""

    arrivals: list[tuple[float, EngineRequest]]
    cancels: list[tuple[float, int]]
    tokens: dict[int, list[object]]
    """Prompt and answer of each request."""


asks = st.lists(
    st.builds(
        Ask,
        program=st.sampled_from("aabc"),
        growth=st.integers(1, 200),
        output=st.integers(1, 150) | st.just(100),
        after_s=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
        keep=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.1]),
        cancel_after_s=st.sampled_from([None, None, None, 0.0, 0.2, 3.0]),
        priority=st.integers(0, 2),
    ),
    min_size=3,
    max_size=14,
)

specs = st.builds(
    VllmEngineSpec,
    num_gpu_blocks=st.integers(24, 60),
    block_size=st.just(8),
    n_state_groups=st.sampled_from([0, 3]),
    step=st.just(QUICK),
    max_num_seqs=st.sampled_from([2, 16, 16]),
    max_num_batched_tokens=st.sampled_from([32, 64, 1024]),
    long_prefill_token_threshold=st.sampled_from([0, 24]),
    scheduler_reserve_full_isl=st.booleans(),
    watermark_ratio=st.sampled_from([0.0, 0.05]),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    has_prefix_cache=st.sampled_from([True, True, False]),
)


def script(turns: Sequence[Ask], most_tokens: int, *, is_patient: bool = False) -> Script:
    """Requests of the turns. `is_patient`: a program's turns are far apart, so that each ends before the next.

    A turn of a patient script repeats what its program's last turn said; an impatient one cannot know whether that is
    over, so it repeats the last prompt alone.
    """
    arrivals: list[tuple[float, EngineRequest]] = []
    cancels: list[tuple[float, int]] = []
    tokens: dict[int, list[object]] = {}
    context: dict[str, list[object]] = {}
    at_s = 0.0
    for i, ask in enumerate(turns):
        at_s += 500.0 if is_patient else ask.after_s
        known = context.get(ask.program, [("system", k) for k in range(SYSTEM_TOKENS)])
        n_kept = max(round(ask.keep * len(known)), SYSTEM_TOKENS)
        output = min(ask.output, most_tokens // 2)
        prompt = (known[:n_kept] + [(i, k) for k in range(ask.growth)])[: most_tokens - output]
        tokens[i] = prompt + [(i, "said", k) for k in range(output)]
        request = EngineRequest(
            request_id=i,
            program_id=ask.program,
            prompt_tokens=len(prompt),
            output_tokens=output,
            prefix_tokens=None if ask.keep == 1.0 and is_patient else n_kept,
            shared_tokens=SYSTEM_TOKENS,
            priority=ask.priority,
        )
        arrivals.append((at_s, request))
        if ask.cancel_after_s is not None and not is_patient:
            cancels.append((at_s + ask.cancel_after_s, i))
        context[ask.program] = tokens[i] if is_patient else prompt
    return Script(arrivals, cancels, tokens)


def most_tokens(spec: VllmEngineSpec) -> int:
    """The longest request that the engine accepts."""
    return (spec.n_blocks - 2 * spec.state_groups) * spec.block_tokens
