"""Laws of the block-level vLLM engine, over random programs, settings and cancellations."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadwise.sim.engine import EngineRequest
from loadwise.sim.scheduler import Plan
from loadwise.sim.vllm_engine import VllmEngine, VllmEngineSpec

from .engine_driver import Seen, drive
from .vllm_requests import Ask, asks, most_tokens, script, specs


class Watch:
    """Looks over an engine's shoulder at every step: what was handed out, and whether what was found is true."""

    def __init__(self, spec: VllmEngineSpec, tokens: dict[int, list[object]]) -> None:
        self.engine = VllmEngine(spec, has_macro_steps=False)
        self.spec = spec
        self.tokens = tokens
        self.memory: dict[int, tuple[object, ...]] = {}
        """What each block holds: the whole context up to its last written token."""
        self.n_computed: dict[int, int] = {}
        self.n_hit_again: dict[int, int] = {}
        self.entered: list[int] = []
        self.n_steps = 0
        self._schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self.schedule  # type: ignore[method-assign]

    def schedule(self) -> Plan:
        running = list(self.engine.scheduler.running)
        waiting = [call.request.request_id for call in self.engine.scheduler.waiting]
        plan = self._schedule()
        self.n_steps += 1
        assert sum(call.n_new for call in plan.calls) <= self.spec.max_num_batched_tokens
        assert len(self.engine.scheduler.running) <= self.spec.max_num_seqs
        new = [call for call in plan.calls if call not in running]
        assert [call.request.request_id for call in new] == waiting[: len(new)], "somebody overtook the head"
        assert not (new and plan.has_preempted), "a step that preempts lets nobody in"
        # In order: a step writes a layer's KV before it attends, so attention may use what this very step computes.
        for call in plan.calls:
            if call in new:
                n_hit = call.n_computed - call.n_new
                self._check_hit(call.request.request_id, n_hit, call.held.attention, call.held.states)
            self._write(call.request.request_id, call.n_computed, call.n_new, call.held.attention, call.held.states)
        return plan

    def _check_hit(self, i: int, n_hit: int, attention: list[int], states: list[list[int | None]]) -> None:
        size, tokens = self.spec.block_tokens, self.tokens[i]
        assert n_hit % size == 0
        assert n_hit < self.engine._calls[i].n_tokens, "the last token must be computed"
        for k in range(n_hit // size):
            assert self.memory[attention[k]] == tuple(tokens[: (k + 1) * size]), "a hit on other content"
        for group in states:
            if n_hit:
                state = group[n_hit // size - 1]
                assert state is not None
                assert self.memory[state] == tuple(tokens[:n_hit]), "a state of another context"
        self.n_hit_again[i] = self.n_hit_again.get(i, 0) + n_hit

    def _write(self, i: int, n: int, n_new: int, attention: list[int], states: list[list[int | None]]) -> None:
        size, tokens = self.spec.block_tokens, self.tokens[i]
        self.n_computed[i] = self.n_computed.get(i, 0) + n_new
        for k in range((n - n_new) // size, -(-n // size)):
            self.memory[attention[k]] = tuple(tokens[: min((k + 1) * size, n)])
        for group in states:
            state = group[(n - 1) // size]
            assert state is not None, "no block for the running state"
            self.memory[state] = tuple(tokens[:n])


@settings(max_examples=120, deadline=None)
@given(turns=asks, spec=specs, is_patient=st.booleans())
def test_hits_are_true_and_steps_lawful(turns: list[Ask], spec: VllmEngineSpec, is_patient: bool) -> None:
    """Law: a prefix that is found is, token by token, what the blocks hold; so are checkpoints of state.

    Also: no step exceeds its tokens or its requests, nobody overtakes the head of the queue, preempting steps let
    nobody in, every request that nobody cancels says all its tokens, blocks balance after every call and are all free
    at the end, and each request computes its prompt less the hit plus its answer less one (more if it was preempted).
    """
    made = script(turns, most_tokens(spec), is_patient=is_patient)
    watch = Watch(spec, made.tokens)
    seen = drive(watch.engine, made.arrivals, made.cancels)
    cancelled = {i for _, i in made.cancels}
    for at_s, request in made.arrivals:
        if request.request_id not in cancelled:
            check_whole(watch, at_s, request, seen[request.request_id])
    assert watch.engine.cache.pool.n_free == spec.n_blocks
    assert len(watch.engine.scheduler.waiting) == 0


def check_whole(watch: Watch, at_s: float, request: EngineRequest, was: Seen) -> None:
    """A request that ran to its end said everything, in order, and computed what it had to."""
    i = request.request_id
    assert was.n_tokens == request.output_tokens
    assert at_s <= was.first_at_s <= was.finished_at_s
    needed = request.prompt_tokens + request.output_tokens - 1
    assert watch.n_computed[i] + watch.n_hit_again[i] >= needed
    if watch.engine.scheduler.n_preemptions == 0:
        assert watch.n_computed[i] == needed - was.cached_tokens


@settings(max_examples=120, deadline=None)
@given(turns=asks, spec=specs, tick_s=st.floats(0.013, 0.4))
def test_macro_steps_equal_single_steps(turns: list[Ask], spec: VllmEngineSpec, tick_s: float) -> None:
    """Law: macro-steps, single steps, and macro-steps taken apart by a driver that calls all the time agree exactly.

    Hits, tokens, preemptions and counters are identical, times to a microsecond.
    """
    made = script(turns, most_tokens(spec))
    engines = [VllmEngine(spec), VllmEngine(spec, has_macro_steps=False), VllmEngine(spec)]
    runs = [
        drive(engine, made.arrivals, made.cancels, tick_s=tick)
        for engine, tick in zip(engines, (math.inf, math.inf, tick_s), strict=True)
    ]
    cancelled = {i for _, i in made.cancels}
    for run, engine in zip(runs[1:], engines[1:], strict=True):
        assert engine.signals(1e9) == engines[0].signals(1e9)
        for i, was in runs[0].items():
            assert run[i].cached_tokens == was.cached_tokens
            if i not in cancelled:
                assert run[i].n_tokens == was.n_tokens
                assert run[i].first_at_s == pytest.approx(was.first_at_s, abs=1e-6 if run is runs[1] else tick_s)
                assert run[i].finished_at_s == pytest.approx(was.finished_at_s, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(turns=asks, spec=specs)
def test_same_input_same_course(turns: list[Ask], spec: VllmEngineSpec) -> None:
    """Law: an engine is a function of its input (L6)."""
    made = script(turns, most_tokens(spec))
    assert repr(drive(VllmEngine(spec), made.arrivals, made.cancels)) == repr(
        drive(VllmEngine(spec), made.arrivals, made.cancels)
    )
