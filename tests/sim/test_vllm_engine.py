"""The block-level vLLM engine in cases small enough to work out by hand."""

import itertools
import math

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError, LawBroken, Overloaded
from loadwise.sim.content import Contents, block_name
from loadwise.sim.engine import ContextTooLong, EngineRequest
from loadwise.sim.programs import pack, run_by_block
from loadwise.sim.scenario import parse_scenario
from loadwise.sim.simulate import simulate
from loadwise.sim.step_time import StepCost
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

from .engine_driver import drive

UNIT = StepCost(fixed_s=1.0, weights_s=0, gemm_s_per_token=0, kv_s_per_token=0, attention_s_per_pair=0, request_s=0)
"""Every step takes a second, whatever it does."""


def request(i: int, prompt: int, output: int, program: str = "", **more: object) -> EngineRequest:
    return EngineRequest(
        request_id=i,
        program_id=program or f"p{i}",
        prompt_tokens=prompt,
        output_tokens=output,
        **more,  # type: ignore[arg-type]
    )


def engine(**changes: object) -> VllmEngine:
    return VllmEngine(VllmEngineSpec(**({"num_gpu_blocks": 100, "block_size": 16, "step": UNIT} | changes)))  # type: ignore[arg-type]


def test_prompt_takes_as_many_steps_as_it_has_budgets() -> None:
    """2,500 prompt tokens at 1,000 a step: the first token after 3 steps, then one a step."""
    seen = drive(engine(num_gpu_blocks=1000, max_num_batched_tokens=1000), [(0.0, request(1, 2500, 4))])
    assert (seen[1].first_at_s, seen[1].finished_at_s) == (3.0, 6.0)


def test_those_that_run_go_first_and_the_prompt_gets_the_rest() -> None:
    """With 100 tokens a step and two decoding, a prompt of 196 needs two steps; alone it would need two as well."""
    arrivals = [(0.0, request(1, 10, 20)), (0.0, request(2, 10, 20)), (5.0, request(3, 196, 1))]
    assert drive(engine(max_num_batched_tokens=100), arrivals)[3].first_at_s == 8.0
    arrivals[2] = (5.0, request(3, 197, 1))
    assert drive(engine(max_num_batched_tokens=100), arrivals)[3].first_at_s == 9.0


def test_threshold_cuts_long_prompts() -> None:
    """`long_prefill_token_threshold` limits one prompt's share of a step, so a short one gets in beside it."""
    arrivals = [(0.0, request(1, 10, 1)), (0.5, request(2, 150, 1)), (0.5, request(3, 40, 1))]
    free = drive(engine(max_num_batched_tokens=100), arrivals)
    cut = drive(engine(max_num_batched_tokens=100, long_prefill_token_threshold=50), arrivals)
    assert (free[3].first_at_s, cut[3].first_at_s) == (3.0, 2.0)


def test_a_hit_is_whole_blocks_and_never_the_last_token() -> None:
    """Context 100 + 10, of which 109 computed: 6 blocks of 16. A prompt of 96 = 6 blocks hits 5 of them."""
    arrivals = [
        (0.0, request(1, 100, 10, "a")),
        (50.0, request(2, 150, 10, "a")),
        (100.0, request(3, 96, 1, "b", shared_tokens=96, shared_key="s")),
        (150.0, request(4, 96, 1, "c", shared_tokens=96, shared_key="s")),
    ]
    seen = drive(engine(), arrivals)
    assert [seen[i].cached_tokens for i in (1, 2, 3, 4)] == [0, 96, 0, 80]


def test_an_edited_context_hits_up_to_the_edit() -> None:
    """What was rewritten after token 50 is unknown from block 3 on, and stays so for the old version's tail."""
    arrivals = [
        (0.0, request(1, 100, 1, "a")),
        (50.0, request(2, 100, 1, "a", prefix_tokens=50)),
        (100.0, request(3, 120, 1, "a")),
    ]
    seen = drive(engine(), arrivals)
    assert [seen[i].cached_tokens for i in (2, 3)] == [48, 96]


def test_the_head_of_the_line_blocks_those_who_would_fit() -> None:
    """Prompts of 60 and 60 blocks do not fit into 100; a third of one block waits behind the second."""
    arrivals = [(0.0, request(1, 950, 10)), (0.5, request(2, 950, 2)), (0.5, request(3, 10, 2))]
    seen = drive(engine(), arrivals)
    assert seen[1].finished_at_s == 10.0
    assert seen[2].first_at_s == seen[3].first_at_s == 11.0


def test_full_prompt_is_reserved_or_only_its_first_chunk() -> None:
    """A prompt of 60 blocks beside one of 50 enters only where its first chunk is enough, and is preempted later."""
    arrivals = [(0.0, request(1, 800, 60)), (0.5, request(2, 950, 2))]
    careful = engine(max_num_batched_tokens=400)
    eager = engine(max_num_batched_tokens=400, scheduler_reserve_full_isl=False)
    assert drive(careful, arrivals)[2].first_at_s > 60.0
    drive(eager, arrivals)
    assert careful.signals(0.0)["n_preemptions"] == 0
    assert eager.signals(0.0)["n_preemptions"] > 0


def test_the_last_admitted_is_preempted_and_finds_its_own_blocks_again() -> None:
    """Two of 49 blocks grow beyond 100: the second loses its blocks, waits, and its tokens are not said twice."""
    one = engine()
    seen = drive(one, [(0.0, request(1, 780, 60)), (0.0, request(2, 780, 60))])
    assert one.signals(0.0)["n_preemptions"] == 1
    assert seen[1].finished_at_s == 60.0
    assert (seen[2].n_tokens, seen[2].cached_tokens) == (60, 0)
    # It was a step behind and had said 20 when the first one's 801st token found no block. From 60 on it says 40 more;
    # the first of them comes with the step that reads again what had been reused meanwhile.
    assert seen[2].finished_at_s == 60.0 + 40.0


def test_priority_preempts_the_least_urgent_and_serves_the_most_urgent() -> None:
    """The urgent one that came last enters next and survives; the first one, least urgent, gives way."""
    arrivals = [
        (0.0, request(1, 780, 60, priority=5)),
        (0.5, request(2, 780, 60, priority=1)),
        (0.5, request(3, 100, 5, priority=9)),
    ]
    fcfs, urgent = engine(), engine(scheduling_policy="priority")
    seen_fcfs, seen = drive(fcfs, arrivals), drive(urgent, arrivals)
    assert seen_fcfs[1].finished_at_s < seen_fcfs[2].finished_at_s
    assert seen[2].finished_at_s < seen[1].finished_at_s
    assert urgent.signals(0.0)["n_preemptions"] >= 1


def test_usage_counts_running_requests_only() -> None:
    """Cached blocks that nobody uses are free: usage falls to zero, while the content can still be hit."""
    one = engine()
    one.submit(request(1, 160, 32, "a"))
    now_s = 0.0
    while (step := one.step(now_s)).seconds:
        assert one.signals(now_s)["kv_usage_ratio"] >= 0.1
        now_s += step.seconds
    assert one.signals(now_s)["kv_usage_ratio"] == 0.0
    assert one.cache.pool.n_named == 11


def test_usage_grows_within_a_macro_step() -> None:
    """A reading in the middle of a macro-step is that of single steps."""
    lazy, eager = engine(), VllmEngine(engine().spec, has_macro_steps=False)
    for one in (lazy, eager):
        one.submit(request(1, 30, 90))
        one.step(0.0)
        one.step(1.0)
    now_s = 1.0
    for _ in range(60):
        now_s += 1.0
        eager.step(now_s)
        assert lazy.signals(now_s)["kv_usage_ratio"] == eager.signals(now_s)["kv_usage_ratio"]


def test_states_of_a_hybrid_model_cost_thousands_of_tokens() -> None:
    """Qwen3.6-27B's blocks (784 tokens, 3 groups of states): a running request holds 2.7 k to 5.1 k tokens more than
    its context on average, and never more than 6 states and a block; nothing of this is set (ORACLE: 3.6 k to 4.7 k).
    """
    one = engine(num_gpu_blocks=900, block_size=784, n_state_groups=3)
    one.submit(request(1, 20_000, 3000))
    over, now_s, n_context = [], 0.0, 0
    while (step := one.step(now_s)).seconds:
        n_context = max(n_context, 20_000 if now_s > 3 else 0) + sum(out.n_new_tokens for out in step.outputs)
        held = round(one.signals(now_s)["kv_usage_ratio"] * 900) * 784
        if n_context:
            over.append(held - n_context)
        now_s += 1.0
    assert 2_700 <= float(np.mean(over)) <= 5_100
    assert max(over) <= 7 * 784
    assert min(over) >= 3 * 784


def test_a_hybrid_hit_ends_where_all_states_are_still_there() -> None:
    """A context of 2,000 tokens at blocks of 784 has a checkpoint at 1,568, and its next turn hits exactly that."""
    one = engine(num_gpu_blocks=900, block_size=784, n_state_groups=3)
    seen = drive(one, [(0.0, request(1, 2000, 10, "a")), (90.0, request(2, 2500, 10, "a"))])
    assert seen[2].cached_tokens == 1568


def test_throughput_does_not_rise_as_kv_falls() -> None:
    """Law: less KV never helps, down to the least that holds one request (the 45-fold error of BLIS #1121)."""
    programs = pack([([300] + [60] * 5, [40] * 6, [0.1] * 6) for _ in range(10)])
    quick = StepCost(fixed_s=0.01, gemm_s_per_token=1e-4, request_s=0.0, weights_s=0.0, kv_s_per_token=0.0)
    rates = []
    for n_blocks in (640, 320, 240, 160, 120, 90, 70, 55, 54):
        one = VllmEngine(VllmEngineSpec(num_gpu_blocks=n_blocks, step=quick))
        rates.append(run_by_block([one], programs, 6).output_tokens_per_s)
    # A hair of slack: with less KV a batch may happen to end a step earlier.
    assert all(less <= more * 1.02 for more, less in itertools.pairwise(rates)), rates
    assert rates[-1] < 0.5 * rates[0]


@pytest.mark.parametrize("bad", [request(1, 1600, 2), request(1, 0, 5), request(1, 5, 0)])
def test_what_can_never_fit_is_refused(bad: EngineRequest) -> None:
    """One token more than all blocks hold, no prompt, or no answer: refused, and nothing changes."""
    one = engine()
    with pytest.raises(ContextTooLong):
        one.submit(bad)
    assert one.step(0.0).seconds == 0.0
    one.submit(request(2, 1600, 1))
    assert one.step(0.0).seconds > 0


def test_limits_are_named() -> None:
    """The model's length and the queue's length bound what is accepted."""
    with pytest.raises(ContextTooLong, match="max_model_len is 100"):
        engine(max_model_len=100).submit(request(1, 90, 11))
    one = engine(max_waiting=1)
    one.submit(request(1, 10, 1))
    with pytest.raises(Overloaded, match="limit is 1"):
        one.submit(request(2, 10, 1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_gpu_blocks": 0}, "num_gpu_blocks"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"watermark_ratio": math.nan}, "watermark_ratio"),
        ({"n_state_groups": 8}, "n_state_groups"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"n_state_groups": 3, "block_size": 784, "max_num_batched_tokens": 512}, "784"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, float], named: str) -> None:
    """Zero capacity, NaN, or a hybrid engine whose chunks never reach a checkpoint (it would stand still)."""
    with pytest.raises(ConfigError, match=named):
        VllmEngineSpec(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_step_costs_out_of_range_are_named(value: float) -> None:
    """Negative, NaN and infinite durations, and steps that take no time at all."""
    with pytest.raises(ConfigError, match="kv_s_per_token"):
        StepCost(kv_s_per_token=value)
    with pytest.raises(ConfigError, match="no time"):
        StepCost(fixed_s=0, weights_s=0, request_s=0)


def test_memory_of_programs_is_bounded() -> None:
    """Ten thousand programs leave no more lines behind than the limit, and one that was forgotten is a new one."""
    contents = Contents(16, limit=50)
    first = contents.open(request(0, 40, 1, "p0"))
    for i in range(10_000):
        one = request(i, 40, 1, f"p{i}")
        contents.open(one)
        contents.close(one, 41)
    assert len(contents) <= 51
    again = contents.open(request(0, 40, 1, "p0"))
    assert block_name(first, 0) != block_name(again, 0)


def test_a_scenario_runs_on_it() -> None:
    """`kind: vllm` stands behind a backend by configuration; the report shows its hits; same seed, same bytes."""
    text = """
scenario: 1
name: vllm-small
n_programs: 20
pool:
  models: {m: {usd_per_million: {input: 0.1, output: 0.4}}}
  backends: [{name: a, model: m, engine: emulator, slots: 32}]
  router: {policy: least_loaded}
engines:
  a: {kind: vllm, num_gpu_blocks: 2000, max_num_seqs: 8, step: {fixed_s: 0.004, kv_s_per_token: 4.0e-8}}
workload:
  arrivals: {kind: poisson, programs_per_s: 2}
  turns: {geometric: 4, max: 8}
"""
    report = simulate(parse_scenario(text), 3)
    assert report.programs == {"finished": 20, "open": 0}
    assert report.hit_ratio is not None
    assert report.hit_ratio > 0.3
    assert simulate(parse_scenario(text), 3).to_json() == report.to_json()
    with pytest.raises(ConfigError, match="num_gpu_blocks"):
        parse_scenario(text.replace("max_num_seqs", "max_seqs"))


class Forgetful(VllmEngine):
    """Says that a request is finished and goes on holding its blocks."""

    def check(self) -> None:
        self.cache.pool.check({})


def test_every_closed_loop_ends_with_a_check_of_the_books() -> None:
    """A run that is cut while requests hold blocks is fine, and one whose engine says that nobody does is not."""
    programs = pack([([100], [50], [0.0])] * 4)
    spec = VllmEngineSpec(num_gpu_blocks=100, step=UNIT)
    assert len(run_by_block([VllmEngine(spec)], programs, 2, until_s=20.0)) == 0
    with pytest.raises(LawBroken):
        run_by_block([Forgetful(spec)], programs, 2, until_s=20.0)
