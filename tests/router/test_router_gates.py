"""Gates, ceilings, shared caches, orders and pauses: who may start, who is next, who gives way."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from router_host import Host, backend, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.ids import TurnId
from loadwise.kernel.work import Usage
from loadwise.router.config import AdmissionConfig, OrderConfig, PauseConfig
from loadwise.router.order import FairOrder, Standing


def host(*backends, order=None, **admission) -> Host:
    """A host with an admission of its own."""
    config = {"admission": AdmissionConfig(**admission)} if admission else {}
    if order is not None:
        config["order"] = order
    return Host(make_stack(*(backends or (backend("a", kv_tokens=10_000),)), expected_tokens=1000, **config))


def n_running(h: Host, backend_id: str = "a") -> int:
    """Turns in flight there."""
    return h.router.backends.by_id[backend_id].n_running


def test_nobody_waits_without_a_gate():
    """`none`: the engine alone; the books are kept all the same."""
    h = host(kind="none")
    for n in range(50):
        h.arrive(f"p{n}", prompt_tokens=900)
    assert n_running(h) == 50
    assert h.router.admission.ledger.headroom("a", at_s=0.0) == 10_000 - 50 * 1000


def test_a_cap_counts_programs():
    """`cap`: so many of the model, whatever their size, and who is refused a place comes next."""
    h = host(kind="cap", programs_max=5, programs_max_by_model={"small": 3})
    for n in range(5):
        h.arrive(f"p{n}", prompt_tokens=9000)
    assert n_running(h) == 3
    h.end_attempt(1)
    assert find(h.finish("p0"), c.Dispatch).program_id == "p3"


def test_other_units_are_hard_limits_under_every_gate():
    """Slots hold under `none` as well."""
    h = host(backend("a", slots=2), kind="none")
    for n in range(5):
        h.arrive(f"p{n}")
    assert n_running(h) == 2


def test_the_allowance_is_part_of_every_reservation():
    """reserve(p) = max(tokens, expected) + overhead; admission stops at 85 % of it all (ORACLE, B.2)."""
    h = host(overhead_tokens=700)
    for n in range(9):
        h.arrive(f"p{n}")
    assert n_running(h) == 5  # 5 * 1700 = 8500
    assert h.router.admission.ledger.account_by_backend["a"].reserved == 8500


def test_the_allowance_is_learned_while_the_engine_is_not_saturated():
    """From usage and our own tokens; a saturated or preempting engine teaches nothing."""
    h = host(backend("a", kv_tokens=100_000), overhead_tokens=0, learns_overhead=True)
    for n in range(4):
        h.arrive(f"p{n}", prompt_tokens=5000)

    def observe(n: int, usage: float, preemptions: float = 0.0) -> int:
        for _ in range(n):
            h.after(1.0)
            values = {"kv_usage_ratio": usage, "n_running": 4.0, "n_waiting": 0.0, "n_preemptions": preemptions}
            h.send(e.SignalsObserved(at_s=h.now_s, backend_id="a", values=values, observed_at_s=h.now_s))
        return h.router.admission.books.overhead_tokens("a")

    assert observe(100, 0.99) == 0
    learned = observe(100, (4 * 5000 + 4 * 3200) / 100_000)
    assert learned == pytest.approx(3200, rel=0.02)
    assert observe(100, 0.99) == learned
    h.end_attempt(1)
    assert h.router.admission.ledger.account_by_backend["a"].amount_by_key["p0"] >= 1000 + learned


def test_the_ceiling_holds_single_calls_and_lets_them_go_in_order():
    """A call of a program that has its place waits while calls in flight fill 95 %; the next return lets it go."""
    h = host(call_ratio=0.95)
    for n in range(3):
        h.serve(f"p{n}", prompt_tokens=100)
    h.arrive("p0", prompt_tokens=9000)
    assert kinds(h.arrive("p1", prompt_tokens=600)) == []
    assert kinds(h.arrive("p2", prompt_tokens=700)) == []
    assert n_running(h) == 1
    freed = h.end_attempt(4, usage=Usage(prompt_tokens=9000, completion_tokens=10))
    assert [d.program_id for d in freed if type(d) is c.Dispatch] == ["p1", "p2"]


def test_one_call_always_goes_out_however_large():
    """Nothing runs there: the ceiling would hold it for ever."""
    h = host(call_ratio=0.95)
    assert "Dispatch" in kinds(h.arrive("p", prompt_tokens=50_000))


def test_bounds_hold_over_a_shared_cache():
    """Two backends over one cache admit together what one would alone, each in its own tokens."""
    h = host(backend("a", kv_tokens=10_000, kv_pool="gpu"), backend("b", "large", kv_tokens=20_000, kv_pool="gpu"))
    for n in range(20):
        h.arrive(f"p{n}", model="small" if n % 2 else "large")
    shares = n_running(h, "a") / 10 + n_running(h, "b") / 20
    assert 0.8 <= shares <= 0.85
    ledger = h.router.admission.ledger
    assert ledger.headroom("a", at_s=0.0) * 2 == pytest.approx(ledger.headroom("b", at_s=0.0), abs=2)
    h.end_attempt(1)
    freed = h.finish("p0")
    assert any(type(command) is c.Dispatch for command in freed), "room on one model is room for the other"


def test_a_common_prompt_is_counted_once_per_backend():
    """Learned from what first calls find in the cache; programs whose first calls find nothing share nothing."""
    for shared, most in ((0, 8), (600, 20)):
        h = host(shares_prompts=True)
        h.arrive("resident")
        for n in range(16):
            h.arrive(f"t{n}", prompt_tokens=900)
            h.end_attempt(h.n_turns, usage=Usage(prompt_tokens=900, completion_tokens=10, cached_tokens=shared))
            h.finish(f"t{n}")
        for n in range(40):
            h.arrive(f"p{n}", prompt_tokens=900)
        assert n_running(h) == pytest.approx(most, abs=2)


def test_capacity_comes_from_the_engine_where_the_file_is_silent():
    """As soon as nothing is held in slots; a declared capacity stands."""
    silent, declared = host(backend("a")), host(backend("a", kv_tokens=10_000))
    for h, expected in ((silent, 5), (declared, 8)):
        values = {"kv_tokens": 6000.0}
        h.send(e.SignalsObserved(at_s=h.now_s, backend_id="a", values=values, observed_at_s=h.now_s))
        for n in range(9):
            h.arrive(f"p{n}")
        assert n_running(h) == expected


def test_a_calibrated_capacity_is_found_from_usage():
    """An engine that holds half of what the file says: its usage under our calls tells, and admission follows."""
    h = host(backend("a", kv_tokens=200_000), capacity="calibrated")
    for n in range(60):
        h.arrive(f"p{n}", prompt_tokens=200 + 37 * n)
        load = h.router.backends.by_id["a"].load
        usage = load.tokens / 100_000 + 500 * load.n_calls / 100_000
        h.after(1.0)
        values = {"kv_usage_ratio": usage, "n_running": float(load.n_calls)}
        h.send(e.SignalsObserved(at_s=h.now_s, backend_id="a", values=values, observed_at_s=h.now_s))
    assert h.router.admission.ledger.account_by_backend["a"].capacity == pytest.approx(100_000, rel=0.02)


def test_no_more_of_a_prompt_is_common_than_it_has():
    """An engine that says it found a billion tokens of a short prompt does not fill the books with them."""
    h = host(shares_prompts=True)
    h.arrive("resident")
    for n in range(16):
        h.arrive(f"t{n}", prompt_tokens=900)
        h.end_attempt(h.n_turns, usage=Usage(prompt_tokens=900, completion_tokens=10, cached_tokens=10**9))
        h.finish(f"t{n}")
    assert h.router.admission.ledger.account_by_backend["a"].common == 900


# --- ThunderAgent ---


def paused_host(**pause) -> Host:
    """One backend of 10,000 tokens behind ThunderAgent's rules."""
    return host(kind="pause", pause=PauseConfig(**pause))


def answer(h: Host, turn_id: int, prompt_tokens: int) -> list[c.Command]:
    """The attempt of a turn ends with a context of so many tokens."""
    return h.end_attempt(turn_id, usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=0))


def test_new_programs_start_where_there_is_room_and_nobody_waits():
    """remaining >= estimate + 100, at 100 tokens a program; who does not fit waits for a tick."""
    h = paused_host()
    h.arrive("p", prompt_tokens=6000)
    h.arrive("q", prompt_tokens=3600)
    assert n_running(h) == 2
    assert "Dispatch" not in kinds(h.arrive("r", prompt_tokens=3000))
    assert "Dispatch" not in kinds(h.arrive("s", prompt_tokens=10)), "somebody waits"
    answer(h, 1, 6000)
    assert kinds(h.finish("p")) == [], "only a tick resumes"
    h.after(5.0)
    resumed = [d.program_id for d in h.wake() if type(d) is c.Dispatch]
    assert sorted(resumed) == ["r", "s"]


def test_over_capacity_the_smallest_between_two_calls_gives_way():
    """Paused at once, and resumed by a later tick when there is room, before new programs."""
    h = paused_host(has_decay=False)
    for n, tokens in enumerate((2000, 3000, 4000)):
        h.arrive(f"p{n}", prompt_tokens=tokens)
    for turn_id, tokens in ((1, 3000), (2, 4000), (3, 5000)):
        answer(h, turn_id, tokens)
    h.after(5.0).wake()
    reserved = [name for name in ("p0", "p1", "p2") if h.router.table.by_id[name].is_reserved]
    assert reserved == ["p1", "p2"]
    assert h.router.counts.pauses == 1
    assert kinds(h.arrive("p0", prompt_tokens=3100)) == []
    h.after(5.0).wake()
    h.finish("p2")
    assert [d.program_id for d in h.after(5.0).wake() if type(d) is c.Dispatch] == ["p0"]


def test_programs_in_a_call_are_marked_and_lose_their_place_when_it_returns():
    """Nobody is between calls: all that run are marked, as the released proxy does."""
    h = paused_host()
    for n in range(2):
        h.arrive(f"p{n}", prompt_tokens=4000)
        h.arrive(f"p{n}", prompt_tokens=5500)
    h.after(5.0).wake()
    marked = [h.router.table.by_id[f"p{n}"].is_marked for n in range(2)]
    assert marked == [True, True]
    for turn_id in (1, 2):
        answer(h, turn_id, 5500)
    assert not h.router.table.by_id["p0"].is_reserved


def test_a_marked_program_keeps_its_place_while_a_call_without_a_prompt_runs():
    """Nothing is counted of such a call, and still it is covered (law L5)."""
    h = paused_host()
    for n in range(2):
        h.arrive(f"p{n}", prompt_tokens=4000)
        h.arrive(f"p{n}", prompt_tokens=5500)
    h.after(5.0).wake()
    h.arrive("p0", prompt_tokens=0)
    for turn_id in (1, 2):
        answer(h, turn_id, 5500)
    assert h.router.table.by_id["p0"].is_reserved
    answer(h, 5, 0)
    assert not h.router.table.by_id["p0"].is_reserved


def test_counting_state_and_headroom_admits_fewer():
    """The variant that counts state blocks and leaves 10 % alone."""
    released, counting = paused_host(), paused_host(state_tokens=1500, headroom_ratio=0.1)
    for h in (released, counting):
        for n in range(10):
            h.arrive(f"p{n}", prompt_tokens=1400)
    assert (n_running(released), n_running(counting)) == (6, 3)


def test_a_learned_allowance_counts_where_it_is_learned():
    """Under `pause` it is no word of the released proxy's: only with `learns_overhead` does it take room."""
    for learns, admitted in ((False, 6), (True, 3)):
        h = host(kind="pause", overhead_tokens=1500, learns_overhead=learns)
        for n in range(10):
            h.arrive(f"p{n}", prompt_tokens=1400)
        assert n_running(h) == admitted


def test_ticks_end_when_nobody_is_there():
    """The agenda is empty after the last program has gone."""
    h = paused_host()
    h.serve("p")
    h.finish("p")
    h.judge("p")
    h.after(5.0).wake()
    assert not [key for key, _ in h.router.agenda.dump() if key.startswith("tick")]


# --- the production order ---


def served(order: FairOrder, now_s: float = 0.0, service_s: float = 1.0) -> list[int]:
    """Serve all."""
    found = []
    while len(order):
        head = order.head(now_s, service_s)
        assert head is not None
        found.append(int(head))
        order.remove(head, is_served=True)
    return found


def fair(*standings: Standing, **config) -> FairOrder:
    """An order with turns 0, 1, 2... of these standings."""
    order = FairOrder(OrderConfig(kind="fair", **config))
    for number, standing in enumerate(standings):
        order.push(TurnId(number), standing)
    return order


def test_tenants_share_by_weight():
    """A tenant of weight 3 gets three turns for one of another, however many either brings."""
    order = fair(*(Standing("a") for _ in range(20)), *(Standing("b") for _ in range(20)), weights={"b": 3.0})
    first = served(order)[:12]
    assert sum(number >= 20 for number in first) == 9


def test_a_tenant_that_was_away_has_no_credit():
    """It begins where the others are: absence is not saved up."""
    order = fair(*(Standing("a") for _ in range(10)))
    for _ in range(5):
        order.remove(order.head(0.0, 1.0), is_served=True)
    for number in range(20, 24):
        order.push(TurnId(number), Standing("b"))
    assert sorted(served(order)[:4]) != [20, 21, 22, 23]


def test_feasible_deadlines_first_then_the_rest_then_the_lost():
    """EDF among what can be met; a lost deadline stands behind."""
    order = fair(Standing(deadline_at_s=50.0), Standing(), Standing(deadline_at_s=300.0), Standing(deadline_at_s=200.0))
    assert served(order, now_s=0.0, service_s=100.0) == [3, 2, 1, 0]


def test_age_comes_before_everything():
    """Whoever has waited `age_s` is next, longest first: nobody starves."""
    order = fair(Standing("a", 0.0), Standing("b", 1.0, 20.0), Standing("b", 2.0, 15.0), age_s=10.0)
    assert served(order, now_s=11.5) == [0, 1, 2]
    assert order.head(0.0, 1.0) is None


def test_a_loaded_order_is_dumped_as_it_was():
    """To the last byte: what tenants have been served is kept in the order in which they came."""
    order, again = fair(Standing("b"), Standing("a"), Standing("a")), fair(Standing("a"))
    order.remove(TurnId(2), is_served=True)
    again.load(order.dump())
    assert list(again.dump().items()) == list(order.dump().items()) == [("b", 0.0), ("a", 1.0)]


pushes = st.lists(
    st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.floats(0.0, 500.0))), min_size=1, max_size=30
)


@given(pushes=pushes, now_s=st.floats(0.0, 250.0), service_s=st.floats(0.0, 100.0), gone=st.sets(st.integers(0, 29)))
def test_l13_edf_is_never_inverted_among_feasible_work(pushes, now_s, service_s, gone):
    """Law L13: of one tenant and age class, no later feasible deadline is served before an earlier one."""
    order = fair(*(Standing(tenant, now_s, deadline) for tenant, deadline in pushes), age_s=1e6)
    for number in gone:
        order.remove(TurnId(number))
    left = [number for number in range(len(pushes)) if number not in gone]
    found = served(order, now_s, service_s)
    assert sorted(found) == left
    for tenant in "abc":
        deadlines = [pushes[n][1] for n in found if pushes[n][0] == tenant and pushes[n][1] is not None]
        feasible = [deadline for deadline in deadlines if deadline >= now_s + service_s]
        assert feasible == sorted(feasible)


def test_the_router_serves_in_the_configured_order():
    """Two tenants, one slot: turns alternate instead of first in, first out; a head that ages is seen."""
    h = host(backend("a", slots=1), order=OrderConfig(kind="fair", age_s=1000.0))
    for n in range(5):
        h.arrive(f"a{n}", tenant="a")
    h.arrive("b0", tenant="b")
    order = []
    for _ in range(5):
        (turn_id,) = h.running
        name = h.running[turn_id].program_id
        h.end_attempt(turn_id)
        order += [d.program_id for d in h.finish(name) if type(d) is c.Dispatch]
    assert order.index("b0") <= 1


# --- capacity that is not declared ---


def test_an_engines_word_is_taken_while_programs_run():
    """A busy pool is never empty: what slots hold is counted in tokens at the first reading, and nothing is lost."""
    h = Host(make_stack(backend("a"), admission=AdmissionConfig(), expected_tokens=1000))
    for n in range(3):
        h.arrive(f"p{n}", prompt_tokens=600 * (n + 1))
    h.arrive("pinned elsewhere", prompt_tokens=50)
    assert h.router.admission.ledger.unit("a") == "slots"
    h.after(1.0)
    h.send(e.SignalsObserved(at_s=h.now_s, backend_id="a", values={"kv_tokens": 10_000.0}, observed_at_s=h.now_s))
    account = h.router.admission.ledger.account_by_backend["a"]
    assert (account.unit, account.capacity) == ("kv_tokens", 10_000)
    assert account.amount_by_key == {"p0": 1000, "p1": 1200, "p2": 1800, "pinned elsewhere": 1000}
    assert "Dispatch" not in kinds(h.arrive("too much", prompt_tokens=9000))
    for turn_id in sorted(h.running):
        h.end_attempt(turn_id)
    for n in range(3):
        h.finish(f"p{n}")
    h.finish("pinned elsewhere")
    assert list(account.amount_by_key) == list(h.router.admission.ledger.account_by_backend["a"].amount_by_key)
    assert [h.router.turns[t].program_id for t in h.running] == ["too much"]
