"""Caches whose bound is learned from answers, and programs that are paused where contexts are lost."""

import msgspec
import pytest
from router_host import Host, backend, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.ids import BackendId, TurnId
from loadwise.kernel.pool import BackendHealth
from loadwise.kernel.work import AttemptOutcome, Usage
from loadwise.ledger.pace import Pace
from loadwise.router.config import AdmissionConfig, DivertConfig, OrderConfig
from loadwise.router.order import Standing, make_order


def n_running(h: Host, backend_id: str = "a") -> int:
    """Turns in flight there."""
    return h.router.backends.by_id[backend_id].n_running


def footprint_host(ratio: float = 0.76, **router) -> Host:
    """One backend of 10,000 tokens behind projected footprints."""
    admission = AdmissionConfig(kind="footprint", call_ratio=0.95, footprint_ratio=ratio)
    return Host(make_stack(backend("a", kv_tokens=10_000), expected_tokens=1000, admission=admission, **router))


def serve_turn(h: Host, name: str, tokens: int, cached: int, answer_tokens: int = 10) -> None:
    """A turn of a program is answered, with so much of its prompt found in the cache."""
    h.arrive(name, prompt_tokens=tokens)
    h.after(1.0)
    usage = Usage(prompt_tokens=tokens, completion_tokens=answer_tokens, cached_tokens=cached)
    h.end_attempt(h.n_turns, usage=usage)


def crowded_host(**router) -> Host:
    """Twelve programs of 620 tokens in a cache of 10,000, one second apart, which have all found their contexts."""
    h = footprint_host(ratio=1.0, **router)
    crowd(h)
    return h


def crowd(h: Host) -> None:
    """Let those twelve come."""
    for number in range(12):
        serve_turn(h, f"p{number}", 600, 0)
    for number in range(12):
        serve_turn(h, f"p{number}", 610, 600)


def again(h: Host, name: str, found: float) -> None:
    """Another turn of a program that appends nothing, with so much of its context found; or it is held."""
    tokens = h.router.table.by_id[name].context_tokens
    h.arrive(name, prompt_tokens=tokens)
    h.after(1.0)
    if h.n_turns in h.running:
        usage = Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=round(found * tokens))
        h.end_attempt(h.n_turns, usage=usage)


def test_contexts_that_are_lost_lower_the_bound():
    """From answers alone; who finds its context leaves it where it is, or raises it a little."""
    bounds = {}
    for found in (1.0, 0.0):
        h = crowded_host()
        for _ in range(6):
            for program in [p for p in h.router.table.by_id.values() if not p.open_turns]:
                again(h, program.program_id, found)
        (residency,) = h.router.admission.books.residency_by_cache.values()
        bounds[found] = residency.bound_ratio
        copy = footprint_host()
        copy.router.load(h.router.dump())
        assert copy.router.admission.books.residency_by_cache == {"backend:a": residency}
    assert bounds[0.0] < 0.7 < AdmissionConfig().footprint_ratio <= bounds[1.0]


def thrashing_host(**router) -> Host:
    """The same when five answers in a row have lost their contexts, and who came last has been paused for it."""
    h = crowded_host(**router)
    for number in range(5):
        again(h, f"p{number}", 0.0)
    assert h.router.admission.books.residency_by_cache["backend:a"].is_thrashing
    return h


def paused(h: Host) -> list[str]:
    """Programs without a place because it was taken from them."""
    return [p.program_id for p in h.router.table.by_id.values() if p.is_paused]


def test_a_thrashing_cache_is_relieved_of_who_came_last():
    """Down to seven tenths of the bound; their next turns are held before those of all who are new."""
    h = thrashing_host()
    assert sorted(paused(h)) == ["p10", "p11", "p7", "p8", "p9"]
    assert h.router.counts.pauses == 5
    assert h.router.admission.books.fill_ratio(BackendId("a")) == pytest.approx(0.43, abs=0.01)
    assert "Dispatch" not in kinds(h.arrive("new", prompt_tokens=10))
    again(h, "p9", 1.0)
    assert list(h.router.admission.order_by_model["small"]) == [h.n_turns, h.n_turns - 1]
    for n in range(60):
        again(h, f"p{n % 7}", 1.0)
    assert [h.running[t].program_id for t in h.running] == ["p9", "new"], "it is calm again"
    assert sorted(paused(h)) == ["p10", "p11", "p7", "p8"], "they have not asked for anything"


@pytest.mark.parametrize("kind", ["ledger", "cap", "none"])
def test_under_other_gates_nobody_is_paused_for_lost_contexts(kind: str):
    """They learn nothing of it either: what they go by is configured."""
    admission = AdmissionConfig(kind=kind)
    h = Host(make_stack(backend("a", kv_tokens=10_000), expected_tokens=100, admission=admission))
    crowd(h)
    for number in range(12):
        again(h, f"p{number}", 0.0)
    assert not paused(h) and not h.router.admission.books.residency_by_cache


def read(h: Host, observed_ago_s: float = 0.0, **values: float) -> None:
    """A reading of the engine's counters."""
    observed_at_s = h.now_s - observed_ago_s
    h.send(e.SignalsObserved(at_s=h.now_s, backend_id=BackendId("a"), values=values, observed_at_s=observed_at_s))


RESTARTS = {
    "it counts from zero": lambda h: read(h, generation_tokens=10.0),
    "a probe finds it down": lambda h: h.set_health("a", "down"),
    "a call finds it gone": lambda h: refused(h, "p0"),
}


def refused(h: Host, name: str) -> None:
    """A call of a program finds nobody there."""
    h.arrive(name, prompt_tokens=610)
    h.end_attempt(h.n_turns, AttemptOutcome.REFUSED)


@pytest.mark.parametrize("restart", [*RESTARTS, None])
def test_an_engine_that_was_started_again_is_no_cliff(restart):
    """All contexts are gone with it, once, and read anew: nobody is paused, and the bound stays. Without a sign of it
    the same answers say that the cache thrashes."""
    h = crowded_host()
    read(h, generation_tokens=5000.0)
    h.after(1.0)
    before = h.router.admission.books.residency_by_cache["backend:a"].bound_ratio
    if restart is not None:
        RESTARTS[restart](h)
        h.set_health("a", "up")
        h.after(1.0)
    for number in range(1, 12):
        again(h, f"p{number}", found=0.0)
    for number in range(1, 12):
        again(h, f"p{number}", found=1.0)
    after = h.router.admission.books.residency_by_cache["backend:a"].bound_ratio
    assert (h.router.counts.pauses == 0, after >= before) == (restart is not None, restart is not None)


def test_a_restart_is_seen_by_a_later_reading_only():
    """One that was read before the newest says nothing; nor does one that counts on, or is no number."""
    h = crowded_host()
    read(h, generation_tokens=5000.0, prompt_tokens=9000.0)
    read(h, observed_ago_s=5.0, generation_tokens=4000.0)
    for value in (5000.0, 5001.0, float("nan")):
        h.after(1.0)
        read(h, generation_tokens=value)
    assert all(program.is_resident for program in h.router.table.by_id.values())
    h.after(1.0)
    read(h, prompt_tokens=8999.0)
    assert not any(program.is_resident for program in h.router.table.by_id.values())


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_cache_that_thrashes_is_seen_however_often_its_engine_flaps(restart):
    """Before every single answer there is a sign of a restart: no engine is excused for ever."""
    h = crowded_host()
    for n in range(1, 200):
        read(h, generation_tokens=5000.0 + n)
        h.after(1.0)
        RESTARTS[restart](h)
        h.set_health("a", "up")
        h.after(1.0)
        again(h, f"p{n % 12}", found=0.0)
    assert h.router.admission.books.residency_by_cache["backend:a"].is_thrashing
    assert h.router.counts.pauses > 0


@pytest.mark.parametrize("restart", RESTARTS)
def test_an_engine_that_was_started_again_a_few_times_is_no_cliff(restart):
    """It fails, and fails again before all have come back: each loss is one of those that a restart explains."""
    h = crowded_host()
    for _ in range(3):
        read(h, generation_tokens=5000.0)
        h.after(1.0)
        RESTARTS[restart](h)
        h.set_health("a", "up")
        h.after(1.0)
        for number in range(1, 12):
            again(h, f"p{number}", found=0.0)
    assert h.router.counts.pauses == 0


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_reading_that_is_left_out_tells_of_no_restart(value):
    """One that is no number, or comes from the future, is not believed in this either."""
    h = crowded_host()
    read(h, generation_tokens=5000.0)
    h.after(1.0)
    read(h, generation_tokens=value)
    read(h, observed_ago_s=-5.0, generation_tokens=10.0)
    assert all(program.is_resident for program in h.router.table.by_id.values())


def together(h: Host) -> None:
    """The machine of both was started again."""
    h.send(e.HostRestarted(at_s=h.now_s))
    h.after(1.0)
    read(h, generation_tokens=10.0)


def replaced(h: Host) -> None:
    """Another engine of the same model, which has counted more, has taken the place of this one."""
    h.send(
        e.BackendAdded(
            at_s=h.now_s, backend=msgspec.structs.replace(backend("a", kv_tokens=10_000), url="http://127.0.0.1:9/v1")
        )
    )
    read(h, generation_tokens=6000.0)


def standing_still(h: Host) -> None:
    """The gateway alone was started again."""
    h.send(e.HostRestarted(at_s=h.now_s))
    h.after(1.0)
    read(h, generation_tokens=6000.0)


def repriced(h: Host) -> None:
    """The same engine under other words."""
    spec = msgspec.structs.replace(backend("a", kv_tokens=10_000), idle_timeout_s=61.0)
    h.send(e.BackendAdded(at_s=h.now_s, backend=spec))


@pytest.mark.parametrize(("change", "is_cliff"), [(together, 0), (replaced, 0), (standing_still, 1), (repriced, 1)])
def test_an_engine_that_was_exchanged_is_no_cliff(change, is_cliff):
    """Nor one that was started again together with the gateway; of one that went on, losses say what they do."""
    h = crowded_host()
    read(h, generation_tokens=5000.0)
    h.after(1.0)
    change(h)
    h.after(1.0)
    for number in range(12):
        again(h, f"p{number}", found=0.0)
    assert (h.router.counts.pauses > 0) == is_cliff


def test_who_is_called_gives_its_place_up_when_it_returns():
    """A call that runs is not broken off."""
    h = crowded_host()
    h.arrive("p11", prompt_tokens=610)
    running = h.n_turns
    for number in range(5):
        again(h, f"p{number}", 0.0)
    last = h.router.table.by_id["p11"]
    assert last.is_paused
    assert last.is_reserved
    h.end_attempt(running, usage=Usage(prompt_tokens=610, completion_tokens=0, cached_tokens=610))
    assert not last.is_reserved
    assert h.router.counts.pauses == len(paused(h)) == 5, "it has counted as gone since it was marked"


def test_a_paused_program_is_not_refused_for_want_of_room():
    """When it has waited as long as a turn may it goes on whatever the room, where a new one gets its 503."""
    h = thrashing_host(hold_max_s=30.0)
    h.arrive("new", prompt_tokens=600)
    again(h, "p9", 1.0)
    h.after(31.0)
    said = h.wake()
    assert [d.program_id for d in said if type(d) is c.Dispatch] == ["p9"]
    assert [d.code for d in said if type(d) is c.EndTurn] == ["held_too_long"]
    assert sorted(paused(h)) == ["p10", "p11", "p7", "p8"]


def test_a_paused_program_goes_on_with_all_its_turns():
    """When one of them has waited as long as it may, the others need not stand in line: it has its place again."""
    h = thrashing_host(hold_max_s=30.0)
    for name in ("p9", "p8", "p9"):
        again(h, name, 1.0)
    for number in range(7):
        h.arrive(f"p{number}", prompt_tokens=620)  # so that the cache stays as full as it is
    h.after(28.0)
    assert [d.program_id for d in h.wake() if type(d) is c.Dispatch][:2] == ["p9", "p9"]


def test_a_paused_program_is_not_refused_for_the_calls_of_others():
    """The ceiling on calls is want of room like any other."""
    h = thrashing_host(hold_max_s=30.0)
    for number in range(6):
        h.arrive(f"p{number}", prompt_tokens=1500)
    again(h, "p9", 1.0)
    h.after(30.0)
    assert [d.program_id for d in h.wake() if type(d) is c.Dispatch] == ["p9"]


def test_a_program_that_went_on_is_parked_in_time():
    """Its place is given back when nothing is heard of it, although it had been parked before."""
    h = thrashing_host(hold_max_s=30.0, park_s=100.0, idle_s=9000.0)
    h.after(50.0)
    for number in range(7):
        again(h, f"p{number}", 1.0)
    h.after(40.0).wake()
    assert h.router.table.by_id["p0"].is_reserved
    h.arrive("p9", prompt_tokens=620)
    h.after(30.0)
    find(h.wake(), c.Dispatch, program_id="p9")
    h.end_attempt(h.n_turns, usage=Usage(prompt_tokens=620, completion_tokens=0, cached_tokens=0))
    assert h.router.table.by_id["p9"].is_reserved
    h.after(101.0).wake()
    assert not h.router.table.by_id["p9"].is_reserved


def test_a_paused_turn_that_fits_does_not_wait_behind_those_that_do_not():
    """It is the head as soon as it is held, and the head is looked at."""
    h = thrashing_host(hold_max_s=300.0)
    h.arrive("new", prompt_tokens=3000)
    for number in range(60):
        again(h, f"p{number % 7}", 1.0)
    assert "Dispatch" in kinds(h.arrive("p9", prompt_tokens=620))


def test_a_program_that_went_on_elsewhere_is_no_longer_paused():
    """A backend that is counted in requests has no cache to relieve; what it holds is never a program's."""
    admission = AdmissionConfig(kind="footprint", footprint_ratio=1.0)
    h = Host(make_stack(backend("a", kv_tokens=10_000), expected_tokens=1000, hold_max_s=30.0, admission=admission))
    crowd(h)
    for number in range(5):
        again(h, f"p{number}", 0.0)
    h.send(e.BackendAdded(at_s=h.now_s, backend=backend("r", requests_per_minute=1)))
    again(h, "p9", 1.0)
    assert h.router.table.by_id["p9"].backend_id == "r"
    assert "p9" not in paused(h)
    h.arrive("p9", prompt_tokens=620)
    h.after(31.0)
    assert "Dispatch" not in kinds(h.wake())


def test_nobody_is_paused_where_it_could_not_come_back():
    """A draining backend keeps who has a place there, and takes nobody else."""
    h = crowded_host()
    h.set_health("a", BackendHealth.DRAINING)
    for number in range(5):
        again(h, f"p{number}", 0.0)
    assert h.router.admission.books.residency_by_cache["backend:a"].is_thrashing
    assert not paused(h)
    assert "Dispatch" in kinds(h.arrive("p11", prompt_tokens=620))


def test_who_is_moved_to_another_model_stands_in_its_line_like_all_others():
    """That its place was taken relieved another cache."""
    h = thrashing_host(divert=DivertConfig(when="held", forecast="elapsed", rebinds=True))
    h.send(e.BackendAdded(at_s=h.now_s, backend=backend("b", "large", kv_tokens=10_000)))
    h.set_health("a", BackendHealth.DOWN)
    h.arrive("new", prompt_tokens=9000)
    h.arrive("other", prompt_tokens=3000)
    h.arrive("p9", prompt_tokens=620)
    assert "p9" not in paused(h)
    assert list(h.router.admission.order_by_model["large"]) == [h.n_turns - 1, h.n_turns]


def test_a_dump_keeps_the_order_of_turns_held_before_their_program_was_paused():
    """By the ceiling on calls; they keep their place in line, loaded or not."""
    h = crowded_host()
    for number in range(5):
        h.arrive(f"p{number}", prompt_tokens=620)
    called = list(h.running)
    for name, tokens in (("p6", 3000), ("new", 5000), ("p11", 7000)):
        h.arrive(name, prompt_tokens=tokens)
    for turn_id in called:
        h.end_attempt(turn_id, usage=Usage(prompt_tokens=620, completion_tokens=0, cached_tokens=0))
    assert "p11" in paused(h)
    assert h.router.turns[h.n_turns].is_held
    copy = footprint_host(ratio=1.0)
    copy.router.load(h.router.dump())
    held = [list(router.admission.order_by_model["small"]) for router in (h.router, copy.router)]
    assert held[0] == held[1] == [h.n_turns - 1, h.n_turns]


def test_one_program_always_goes_on():
    """However much of the cache is too much."""
    h = footprint_host(ratio=1.0)
    for number in range(2):
        serve_turn(h, f"p{number}", 300, 0)
    serve_turn(h, "p0", 5000, 300)
    serve_turn(h, "p1", 5000, 300)
    for _ in range(8):
        again(h, "p0", 0.0)
    assert sorted(paused(h)) == ["p1"]
    for _ in range(200):
        again(h, "p0", 0.0)
    assert sorted(paused(h)) == ["p1"]


def test_a_program_whose_prompts_never_begin_alike_says_nothing_of_the_cache():
    """A time of day in its first line: it finds nothing in any cache, and shuts nobody out."""
    h = crowded_host()
    serve_turn(h, "clock", 600, 0)
    for _ in range(100):
        again(h, "clock", 0.0)
    assert not h.router.admission.books.residency_by_cache["backend:a"].is_thrashing
    assert paused(h) == []


def test_a_huge_program_that_was_paused_comes_back_beside_others():
    """Counted twice it would need more than the bound, and stand before all others until the cache is empty."""
    h = footprint_host(ratio=1.0)
    names = [f"p{number}" for number in range(5)] + ["huge"]
    for tokens in (500, 600):
        for name in names:
            serve_turn(h, name, tokens, tokens - 100)
    serve_turn(h, "huge", 3000, 600)
    for n in range(8):
        again(h, f"p{n % 5}", 0.0)
    assert paused(h) == ["huge"]
    for n in range(60):
        again(h, f"p{n % 5}", 1.0)
    again(h, "huge", 0.0)
    assert paused(h) == ["huge"], "all together were too many"
    for n in range(3):
        h.finish(f"p{n}")
    again(h, "p3", 1.0)
    assert paused(h) == []
    assert h.router.admission.gate.bound_ratio(BackendId("a")) < 2 * 0.3


@pytest.mark.parametrize("kind", ["fifo", "fair"])
def test_who_was_paused_is_first_in_every_order(kind):
    """Before those that came earlier, and among themselves in the order in which they were held."""
    order = make_order(OrderConfig(kind=kind, age_s=1.0))
    for number in range(4):
        order.push(TurnId(number), Standing(is_paused=number % 2 > 0))
    served = []
    while len(order):
        assert next(iter(order)) == order.head(100.0, 1.0)
        served.append(order.head(100.0, 1.0))
        order.remove(served[-1], is_served=True)
    assert served == [1, 3, 0, 2]


def test_a_conversation_that_was_cut_short_says_nothing_of_the_cache():
    """Its prompt is shorter than its context was: what is not found there was not lost."""
    h = footprint_host()
    for _ in range(40):
        serve_turn(h, "p", 4000, 10)
        serve_turn(h, "p", 3000, 10)
    assert all(
        r.bound_ratio == AdmissionConfig().footprint_ratio for r in h.router.admission.books.residency_by_cache.values()
    )


def test_no_stall_when_estimates_are_stale():
    """Progress: after an hour in which no program could end in time, an idle backend still takes them, one by one.

    Gating on predicted run times stalled where they were those of a crowd that is gone."""
    h = footprint_host(budget_s=100.0, budget_starts="admission", hold_max_s=1e6)
    for n in range(6):
        for turn in range(3):
            serve_turn(h, f"s{n}", 100 + 20 * turn, 90)
        h.finish(f"s{n}")
    pace = h.router.admission.books.pace_by_backend["a"]
    for _ in range(300):
        pace.read(n_programs=8, cycle_s=5000.0, at_s=h.now_s)
    assert pace.is_known
    for n in range(20):
        h.arrive(f"p{n}", prompt_tokens=100)
    n_served = 0
    while h.running:
        turn_id = next(iter(h.running))
        name = h.running[turn_id].program_id
        h.after(0.5)
        h.end_attempt(turn_id)
        h.finish(name)
        n_served += 1
    assert n_served == 20
    assert h.router.admission.n_held == 0


def test_what_is_learned_of_a_cache_goes_with_it_and_with_the_wish_to_learn():
    """A removed backend's bound is forgotten, and a configuration that does not learn goes by its own word."""
    h = footprint_host()
    for n in range(4):
        serve_turn(h, f"p{n}", 600, 0)
    serve_turn(h, "p0", 610, 600)
    assert h.router.admission.books.residency_by_cache
    fixed = Host(
        make_stack(backend("a", kv_tokens=10_000), admission=AdmissionConfig(kind="footprint", learns_footprint=False))
    )
    fixed.router.load(h.router.dump())
    assert not fixed.router.admission.books.residency_by_cache
    h.send(e.BackendRemoved(at_s=h.now_s, backend_id="a"))
    assert not h.router.admission.books.residency_by_cache


def test_answers_at_one_instant_poison_no_pace():
    """Clocks are coarse and caches fast: answers may come at the instant of the one before."""
    h = footprint_host(budget_s=100.0, budget_starts="admission")
    for n in range(8):
        for _ in range(12):
            h.serve(f"p{n}")
        h.finish(f"p{n}")
    assert h.router.admission.books.pace_by_backend["a"].is_known
    h.serve("resident")
    h.arrive("next")
    assert n_running(h) == 1


def test_a_slow_hour_does_not_keep_a_model_out_of_a_cache_that_others_use():
    """Nobody of it is there, so no answer will ever tell another pace: the first is let in on trust."""
    pool = [backend("a", kv_tokens=10_000, kv_pool="gpu"), backend("b", "large", kv_tokens=10_000, kv_pool="gpu")]
    config = {"admission": AdmissionConfig(kind="footprint"), "budget_s": 100.0, "budget_starts": "admission"}
    h = Host(make_stack(*pool, expected_tokens=1000, hold_max_s=1e6, **config))
    slow = h.router.admission.books.pace_by_backend[BackendId("a")] = Pace(turns=[3] * 6)
    for n in range(300):
        slow.read(n_programs=2 + n % 8, cycle_s=1000.0 * (2 + n % 8), at_s=h.now_s)
    h.serve("resident", model="large")
    h.arrive("first", model="small")
    h.arrive("second", model="small")
    assert n_running(h) == 1, "the second waits for what the first one's answers say"


def test_who_runs_out_of_time_while_parked_lets_others_look():
    """A parked program gives nothing back, but what it teaches may change the gate's word (law L9)."""
    h = footprint_host(budget_s=50.0, budget_starts="admission", park_s=10.0)
    serve_turn(h, "parked", 600, 0)
    h.after(20.0).wake()
    assert not h.router.admission.ledger.account_by_backend["a"].amount_by_key
    looked = []
    stir = h.router.backends.stir
    h.router.backends.stir = lambda backend_id: (looked.append(backend_id), stir(backend_id))[1]
    h.after(40.0).wake()
    assert h.router.table.by_id["parked"].state == "timed_out"
    assert looked == ["a"]
