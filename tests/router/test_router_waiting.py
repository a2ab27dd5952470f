"""Forecasts of waits as the router makes them: who is ahead, what the gate counts, what survives a dump."""

import pytest
from router_host import Host, backend, find, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel.work import Usage
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import AdmissionConfig, DivertConfig, TradeConfig

KNOWN = PolicySpec(name="known", options={"success": {"small": {"*": 0.5}, "large": {"*": 0.7}}})


def host(*backends, **router) -> Host:
    """A host whose selector prefers `large`, and which forecasts without ever diverting."""
    router.setdefault("divert", DivertConfig(when="arrival", forecast="elapsed"))
    return Host(
        make_stack(
            *(backends or (backend("a", slots=1), backend("b", "large", slots=2))),
            policy=KNOWN,
            trade=TradeConfig(beta=0.0),
            expected_run_s=600.0,
            hold_max_s=1e6,
            **router,
        )
    )


def waits(commands, model="large"):
    """(point, low, high) of a model as a decision records them."""
    decision = find(commands, c.RecordDecision)
    view = next(view for view in decision.candidates if view.candidate == model)
    return view.wait_s, view.wait_low_s, view.wait_high_s


def test_each_behind_the_other_waits_longer_and_inside_its_interval():
    """Law: monotone in the place, and the point lies in the interval."""
    h = host()
    for n in range(2):
        h.arrive(f"r{n}")
    found = [waits(h.arrive(f"p{n}")) for n in range(6)]
    points = [point for point, _, _ in found]
    assert points == sorted(points) and points[0] > 0.0
    assert all(low <= point <= high for point, low, high in found)


def test_elapsed_times_shorten_the_wait():
    """Whoever arrives when the running have nearly ended is told a shorter wait than who arrives at their beginning."""
    early, late = host(), host()
    for h in (early, late):
        h.arrive("r0")
        h.arrive("r1")
    late.after(500.0)
    assert waits(late.arrive("p"))[0] < waits(early.arrive("p"))[0]


@pytest.mark.parametrize("budget_s", [None, 100.0])
def test_a_time_budget_bounds_the_wait(budget_s):
    """Programs that are cut off leave by then, whatever the prior says of their run times."""
    h = host(budget_s=budget_s, budget_starts="admission")
    h.arrive("r0", prompt_tokens=100)
    h.arrive("r1", prompt_tokens=100)
    wait_s = waits(h.arrive("p", prompt_tokens=100))[0]
    assert (wait_s <= 130.0) == (budget_s is not None)


def test_the_papers_point_gets_an_interval_that_holds_it():
    """`forecast: mean` decides by (q + 1) D / K; what is shown beside it is the distribution."""
    h = host(divert=DivertConfig(when="arrival", forecast="mean"))
    h.arrive("r0")
    h.arrive("r1")
    point, low, high = waits(h.arrive("p"))
    assert (point == 300.0 and low < point < high) or low == point


def test_a_wait_is_told_where_no_rule_needs_one():
    """Without divert the chosen model's wait is in the decision as soon as somebody waits already, and no other's."""
    h = host(divert=DivertConfig())
    for n in range(3):
        h.arrive(f"p{n}")
    commands = h.arrive("q")
    assert waits(commands)[0] > 0.0
    assert waits(commands, "small") == (None, None, None)


def test_requests_per_minute_are_a_timetable():
    """Behind n requests of a window's two the wait is known to the second."""
    h = host(backend("a", slots=1), backend("b", "large", requests_per_minute=2))
    h.arrive("r0")
    h.after(10.0)
    h.arrive("r1")
    assert [round(waits(h.arrive(f"p{n}"))[0]) for n in range(4)] == [50, 60, 110, 120]


def test_who_leaves_the_line_is_counted():
    """A cancelled program teaches that lines become shorter by themselves; one that starts does not."""
    h = host()
    for name in ("r0", "r1", "p", "q"):
        h.arrive(name)
    demand = h.router.admission.demand_by_model["large"]
    h.after(50.0)
    h.finish("p")
    assert (demand.n_left, demand.waited_s) == (1, 50.0)
    h.end_attempt(1, usage=Usage(prompt_tokens=100, completion_tokens=10))
    h.finish("r0")
    assert (demand.n_left, demand.waited_s) == (1, 100.0)


@pytest.mark.parametrize("kind", ["ledger", "footprint"])
def test_a_dump_forecasts_as_the_original(kind):
    """Twins: what is learned of lives, lines and errors is in the snapshot."""
    twins = []
    for _ in range(2):
        h = host(backend("b", "large", kv_tokens=20_000), admission=AdmissionConfig(kind=kind), expected_tokens=4000)
        for n in range(12):
            h.arrive(f"p{n}", prompt_tokens=500)
        h.after(30.0)
        for turn_id in list(h.running)[:2]:
            h.end_attempt(turn_id, usage=Usage(prompt_tokens=3000, completion_tokens=500))
        h.finish("p0")
        twins.append(h)
    state = twins[0].router.dump()
    twins[1].router.load(state)
    assert twins[1].router.dump() == state
    first, second = (twin.arrive("q", prompt_tokens=500) for twin in twins)
    assert find(first, c.RecordDecision).candidates == find(second, c.RecordDecision).candidates


def test_a_model_that_nobody_runs_has_a_wait():
    """Its backend is empty, yet calls are held for it: the wait is a life, not a fault."""
    h = host(backend("b", "large", kv_tokens=20_000), admission=AdmissionConfig(kind="ledger"))
    h.arrive("p", prompt_tokens=500)
    h.end_attempt(1, usage=Usage(prompt_tokens=3000, completion_tokens=500))
    h.finish("p")
    assert 0.0 < h.router.desk.divert.waiting.line("large", 3, h.router.now_s)(3).wait_s < 1e5


def test_a_line_whose_gate_reserves_is_forecast_by_peaks():
    """While others wait it is the ledger's line; contexts alone would let more in."""
    waits_s = {}
    for kind, reserves in (("ledger", False), ("footprint", True), ("footprint", False)):
        admission = AdmissionConfig(kind=kind, reserves=reserves, footprint_ratio=0.85)
        h = Host(make_stack(backend("a", kv_tokens=10_000), admission=admission, expected_tokens=2000))
        for n in range(4):
            h.arrive(f"p{n}", prompt_tokens=1500)
            h.after(10.0).end_attempt(h.n_turns, usage=Usage(prompt_tokens=1500, completion_tokens=100))
        waits_s[kind, reserves] = h.router.desk.divert.waiting.line("small", 4, h.now_s)(3).wait_s
    assert waits_s["footprint", True] == waits_s["ledger", False] != waits_s["footprint", False]
