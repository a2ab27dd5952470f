"""The simple engine: its time formula, its queue, its KV tokens and its prefix cache."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, Overloaded
from loadwise.sim.engine import ContextTooLong, EngineRequest
from loadwise.sim.simple_engine import SimpleEngine, SimpleEngineSpec

from .engine_driver import drive


def request(i: int, prompt: int = 100, output: int = 10, program: str = "", prefix: int | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=i,
        program_id=program or f"p{i}",
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_tokens=prefix,
    )


def spec(**changes: object) -> SimpleEngineSpec:
    values = {"prefill_tokens_per_s": 1000.0, "decode_steps_per_s": 10.0, "batch_slowdown_ratio": 0.5} | changes
    return SimpleEngineSpec(**values)  # type: ignore[arg-type]


def test_lone_request_takes_its_prefill_and_its_steps() -> None:
    """One request: prompt/rate until its first token, then one step for each further token."""
    seen = drive(SimpleEngine(spec()), [(2.0, request(1, prompt=500, output=11))])
    assert seen[1].first_at_s == pytest.approx(2.5)
    assert seen[1].finished_at_s == pytest.approx(2.5 + 10 / 10)
    assert seen[1].n_tokens == 11


def test_decode_slows_with_the_batch_by_the_stated_formula() -> None:
    """Four requests together decode at (1 + 0.5 * 3) / 10 s a step, the last three at (1 + 0.5 * 2) / 10 s."""
    seen = drive(SimpleEngine(spec()), [(0.0, request(i, prompt=100, output=5)) for i in range(4)])
    # The first is alone in the first step, since it began before the other three came at the same instant.
    assert max(s.finished_at_s for s in seen.values()) == pytest.approx(0.1 + (0.3 + 0.1) + 3 * 0.25 + 0.2)


def test_prefill_is_chunked() -> None:
    """No step reads more than its chunk; a prompt of 2.5 chunks needs three steps."""
    engine = SimpleEngine(spec(prefill_chunk_tokens=200))
    engine.submit(request(1, prompt=500, output=1))
    lengths, now_s = [], 0.0
    while (step := engine.step(now_s)).seconds:
        lengths.append(round(step.seconds, 9))
        now_s += step.seconds
    assert lengths == [0.2, 0.2, 0.1]


def test_hit_is_the_common_context_but_never_the_whole_prompt() -> None:
    """A later turn hits the cached context; an equal prompt hits all but its last token; a foreign program nothing."""
    engine = SimpleEngine(spec())
    turns = [
        (0.0, request(1, prompt=100, output=10, program="a")),
        (10.0, request(2, prompt=150, output=10, program="a")),
        (20.0, request(3, prompt=150, output=10, program="a")),
        (30.0, request(4, prompt=300, output=10, program="a", prefix=60)),
        (40.0, request(5, prompt=300, output=10, program="b")),
    ]
    seen = drive(engine, turns)
    assert [seen[i].cached_tokens for i in range(1, 6)] == [0, 110, 149, 60, 0]
    assert engine.signals(99.0)["prefix_hits_tokens"] == 110 + 149 + 60
    assert engine.signals(99.0)["prefix_queries_tokens"] == 100 + 150 + 150 + 300 + 300


def test_hits_save_prefill_time() -> None:
    """The second turn reads only what is new."""
    turns = [(0.0, request(1, 1000, 1, "a")), (10.0, request(2, 1500, 1, "a"))]
    seen = drive(SimpleEngine(spec()), turns)
    assert seen[2].first_at_s == pytest.approx(10.0 + (1500 - 1001) / 1000)
    cold = drive(SimpleEngine(spec(has_prefix_cache=False)), turns)
    assert cold[2].first_at_s == pytest.approx(11.5)
    assert cold[2].cached_tokens == 0


def test_least_recently_used_cache_goes_first() -> None:
    """When KV is short, the program that was away longest loses its context, the other keeps it."""
    engine = SimpleEngine(spec(kv_tokens=1000))
    turns = [
        (0.0, request(1, 390, 10, "a")),
        (10.0, request(2, 390, 10, "b")),
        (20.0, request(3, 290, 10, "c")),
        (30.0, request(4, 395, 10, "b")),
        (40.0, request(5, 395, 10, "a")),
    ]
    seen = drive(engine, turns)
    assert seen[4].cached_tokens == 394
    assert seen[5].cached_tokens == 0


def test_requests_wait_while_kv_is_full_and_enter_in_order() -> None:
    """Two that do not fit together run one after the other, and a small third does not overtake the second."""
    engine = SimpleEngine(spec(kv_tokens=1000))
    seen = drive(engine, [(0.0, request(1, 600, 50)), (0.1, request(2, 600, 50)), (0.2, request(3, 10, 5))])
    assert seen[2].first_at_s > seen[1].finished_at_s
    assert seen[3].first_at_s >= seen[2].first_at_s


def test_growth_beyond_kv_preempts_the_last_and_loses_no_token() -> None:
    """Three that fit at first and outgrow the KV: some are preempted, each says exactly its tokens, once."""
    engine = SimpleEngine(spec(kv_tokens=400))
    seen = drive(engine, [(0.0, request(i, 100, 150)) for i in range(3)])
    assert engine.signals(0.0)["n_preemptions"] > 0
    assert [seen[i].n_tokens for i in range(3)] == [150, 150, 150]
    assert seen[0].finished_at_s < seen[2].finished_at_s


def test_cancel_frees_kv_at_once() -> None:
    """A cancelled request's KV and slot are free before its step is over, and the next in line gets in."""
    engine = SimpleEngine(spec(kv_tokens=1000))
    seen = drive(engine, [(0.0, request(1, 800, 100)), (0.1, request(2, 800, 10))], cancels=[(3.0, 1)])
    assert engine.signals(0.0)["kv_usage_ratio"] == 0.0
    assert math.isnan(seen[1].finished_at_s)
    assert seen[2].first_at_s == pytest.approx(3.0, abs=1.0)
    assert engine.cancel(1) is False


def test_cancelled_context_stays_cached() -> None:
    """What a cancelled request had computed serves its program's next turn."""
    engine = SimpleEngine(spec())
    seen = drive(engine, [(0.0, request(1, 500, 100, "a")), (9.0, request(2, 700, 1, "a"))], cancels=[(5.0, 1)])
    assert 500 < seen[2].cached_tokens < 600


def test_slow_engine_takes_longer_from_the_next_step_on() -> None:
    """At a quarter of the speed a decode step takes four times as long, also in the middle of a macro-step."""
    engine = SimpleEngine(spec())
    engine.submit(request(1, prompt=100, output=101))
    assert engine.step(0.0).seconds == pytest.approx(0.1)
    assert engine.step(0.1).seconds == pytest.approx(10.0)
    assert engine.step(5.05).outputs[0].n_new_tokens == 49
    engine.set_speed(0.25)
    step = engine.step(5.05)
    assert step.seconds == pytest.approx(0.05)
    assert engine.step(5.1).seconds == pytest.approx(50 * 0.4)


@pytest.mark.parametrize("bad", [request(1, 150_000, 60_000), request(1, 0, 5), request(1, 5, 0)])
def test_what_can_never_fit_is_refused(bad: EngineRequest) -> None:
    """A request beyond the KV, without prompt or without output is refused, and changes nothing."""
    engine = SimpleEngine(spec())
    with pytest.raises(ContextTooLong):
        engine.submit(bad)
    assert engine.step(0.0).seconds == 0.0


def test_queue_is_bounded() -> None:
    """The queue refuses one more than its limit (law L15)."""
    engine = SimpleEngine(spec(max_waiting=2))
    engine.submit(request(1))
    engine.submit(request(2))
    with pytest.raises(Overloaded, match="limit is 2"):
        engine.submit(request(3))


@pytest.mark.parametrize(
    "changes", [{"slots": 0}, {"kv_tokens": 0}, {"decode_steps_per_s": math.nan}, {"batch_slowdown_ratio": -1.0}]
)
def test_specs_out_of_range_are_refused(changes: dict[str, float]) -> None:
    """Zero, negative and non-finite settings are named in a ConfigError."""
    with pytest.raises(ConfigError, match=next(iter(changes))):
        SimpleEngineSpec(**changes)  # type: ignore[arg-type]


calls = st.lists(
    st.tuples(
        st.floats(0, 20, allow_nan=False),
        st.integers(1, 300),
        st.integers(1, 60),
        st.sampled_from("abc"),
        st.none() | st.floats(0, 30),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(calls=calls, kv_tokens=st.integers(400, 1200), slots=st.integers(1, 5), tick_s=st.floats(0.013, 0.4))
def test_macro_steps_equal_single_steps(
    calls: list[tuple[float, int, int, str, float | None]], kv_tokens: int, slots: int, tick_s: float
) -> None:
    """Law: an engine woken only when it asks to be and one called early all the time do the same work.

    Also, after every call the books balance, and every request that nobody cancels says all its tokens.
    """
    # Nobody arrives in the very instant in which a step ends: who comes first would hang on the last bit of a sum.
    calls = [(call[0] + 0.0000437 * (i + 1), *call[1:]) for i, call in enumerate(calls)]
    arrivals = [(at, request(i, p, o, program)) for i, (at, p, o, program, _) in enumerate(calls)]
    cancels = [(at + after, i) for i, (at, _, _, _, after) in enumerate(calls) if after is not None]
    some = spec(kv_tokens=kv_tokens, slots=slots, prefill_chunk_tokens=128)
    lazy = drive(SimpleEngine(some), arrivals, cancels)
    eager = drive(SimpleEngine(some), arrivals, cancels, tick_s=tick_s)
    cancelled = {i for _, i in cancels}
    for i, (_, _, n_output, _, _) in enumerate(calls):
        if i not in cancelled:
            assert lazy[i].n_tokens == n_output
            assert eager[i].n_tokens == n_output
            assert eager[i].cached_tokens == lazy[i].cached_tokens
            assert eager[i].finished_at_s == pytest.approx(lazy[i].finished_at_s, abs=1e-6)
