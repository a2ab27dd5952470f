"""Each law of the router: kept over a long course, and seen by `check` when it is broken.

`tests/router/test_router_storm.py` looks for courses that break them; here each has its own name.
"""

import random

import pytest
from router_host import Host, backend, encoded, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import LawBroken
from loadwise.kernel.ids import BackendId, DecisionId, ModelId, ProgramId
from loadwise.kernel.pool import BackendHealth, Signal
from loadwise.kernel.work import ProgramState, Usage
from loadwise.policy.registry import PolicySpec
from loadwise.router.program import OUTPUT_RESERVED_MAX_TOKENS


def busy_host(n_programs=40, seed=5, **router):
    """A course of programs with retries, side turns, abandons and verdicts over a small pool."""
    backends = [
        backend("a", slots=2),
        backend("b", kv_tokens=2000),
        backend("c", "large", requests_per_minute=20),
        backend("d", "large", slots=1),
    ]
    h = Host(make_stack(*backends, **{"expected_tokens": 300, "attempts_max": 3, **router}))
    draw = random.Random(seed)
    for n in range(n_programs):
        h.after(draw.choice([0.0, 0.5, 7.0])).arrive(f"p{n % 13}", prompt_tokens=draw.randrange(1200))
        if draw.random() < 0.3:
            h.arrive(f"p{n % 13}", model="large")
        for turn_id in sorted(h.running):
            if turn_id in h.running and draw.random() < 0.5:
                how = draw.choice(["completed", "completed", "completed", "broken", "status", "idle_timeout"])
                h.end_attempt(turn_id, how, **({"status": 500} if how == "status" else {}))
        if h.open and draw.random() < 0.2:
            h.abandon(min(h.open))
        if draw.random() < 0.4:
            h.finish(f"p{draw.randrange(13)}")
        if draw.random() < 0.4:
            h.judge(f"p{draw.randrange(13)}", draw.choice(["pass", "fail", "abstain"]))
    return h


def run_out(h):
    """Let everything end by time."""
    for _ in range(8):
        for turn_id in sorted(h.running):
            h.end_attempt(turn_id)
        h.after(4000.0).wake()
    return h


def broken(h, law, spoil):
    """Spoil the state of a router and expect its check to name the law."""
    spoil(h.router)
    with pytest.raises(LawBroken) as raised:
        h.router.check()
    assert raised.value.law == law, raised.value


def test_l1_turns_are_conserved():
    """arrived = completed + failed + rejected + evicted + cancelled + open."""
    h = busy_host()
    counts = h.router.counts
    fates = list(h.fate_by_turn.values())
    for fate in ("completed", "failed", "rejected", "evicted", "cancelled"):
        assert getattr(counts, fate) == fates.count(fate), fate
    assert counts.arrived == len(fates) + len(h.open) and min(map(fates.count, ("completed", "failed"))) > 0
    counts.completed += 1
    broken(h, "L1", lambda router: None)


def test_l1_forgotten_programs_are_gone():
    """A program that was rejected or failed is in no table."""
    h = busy_host()
    assert h.router.counts.forgotten > 0
    program = next(iter(h.router.table.by_id.values()))
    program.state = ProgramState.FAILED
    broken(h, "L1", lambda router: None)


def test_l2_one_terminal_outcome_a_turn():
    """The host's account refuses a second one; the router's tables agree with each other."""
    h = busy_host()
    assert set(h.fate_by_turn) | h.open == set(range(1, h.n_turns + 1)) and not set(h.fate_by_turn) & h.open
    h.arrive("one more")
    broken(h, "L2", lambda router: router.table.by_id[ProgramId("one more")].open_turns.clear())


def test_l2_turns_in_flight_are_counted():
    """n_running of a backend is what runs there."""
    h = busy_host()
    broken(h, "L2", lambda router: setattr(router.backends.by_id[BackendId("a")], "n_running", 99))


def test_l3_time_never_falls():
    """The stack refuses an earlier event and stays as it was."""
    h = busy_host()
    state = h.stack.dump()
    with pytest.raises(LawBroken, match="L3"):
        h.stack.handle(e.TimerFired(at_s=h.now_s - 1.0, timer="router"))
    assert h.stack.dump() == state


def test_l4_nothing_leaks_on_any_exit_path():
    """After everything has ended the accounts are at exactly zero, nothing runs, pends or is due."""
    h = run_out(busy_host(n_programs=120))
    h.assert_at_rest()
    assert len(h.router.agenda) == 0 or {key for key, _ in h.router.agenda.dump()} <= {"retry:a", "window:c"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda router: setattr(router.admission.ledger.account_by_backend["a"], "reserved", 7),
        lambda router: router.table.by_id[ProgramId("ended")].__setattr__("is_reserved", True),
    ],
)
def test_l4_check_sees_a_leak(spoil):
    """A sum that is wrong, an ended program with a reservation."""
    h = Host(make_stack(backend("a", slots=2)))
    h.serve("ended")
    h.finish("ended")
    spoil(h.router)
    with pytest.raises(LawBroken, match=r"L4|L5"):
        h.router.check()


def test_l5_every_dispatch_is_covered_in_the_backends_own_unit():
    """At the moment of each dispatch, and by one live reservation."""
    h = busy_host(n_programs=80)
    ledger = h.router.admission.ledger
    for n in range(6):
        h.arrive(f"new{n}")
    assert h.running
    for turn_id, dispatch in h.running.items():
        keys = [dispatch.program_id, h.router.turns[turn_id].key]
        assert sum(ledger.holds(key, dispatch.backend_id) for key in keys) >= 1
    turn_id, dispatch = next(iter(h.running.items()))
    key = next(k for k in (h.router.turns[turn_id].key, dispatch.program_id) if ledger.holds(k, dispatch.backend_id))
    broken(h, "L5", lambda router: ledger.release(key, dispatch.backend_id))


def reserved(h, name, key):
    """What a key holds on a backend."""
    return h.router.admission.ledger.account_by_backend[name].amount_by_key.get(key)


def test_l5_reservation_follows_a_turn_when_it_is_dispatched():
    """A bound program's long turn is promised its real size before it runs, and nobody is admitted beside it."""
    h = Host(make_stack(backend("a", kv_tokens=100_000), expected_tokens=500))
    h.serve("p")
    assert reserved(h, "a", "p") == 500
    find(h.arrive("p", prompt_tokens=90_000, max_output_tokens=300), c.Dispatch)
    assert reserved(h, "a", "p") == 90_300
    h.arrive("p", prompt_tokens=50)
    assert kinds(h.arrive("q")) == ["RecordDecision"]
    h.end_attempt(3)
    assert reserved(h, "a", "p") == 90_300, "a small sibling's end must not shrink what still runs"
    find(h.end_attempt(2, "completed", usage=Usage(prompt_tokens=70_000)), c.Dispatch, program_id="q")
    assert reserved(h, "a", "p") == 70_000
    h.arrive("p", prompt_tokens=95_000)
    h.end_attempt(5, "idle_timeout", first_byte_at_s=0.0)
    assert reserved(h, "a", "p") == 70_000, "what failed for good gives its growth back"


def test_l5_output_that_is_asked_for_is_promised_within_reason():
    """A limit of 64,000 tokens that nobody uses must not keep everybody else out."""
    h = Host(make_stack(backend("a", kv_tokens=100_000), expected_tokens=500))
    h.arrive("p", prompt_tokens=2_000, max_output_tokens=64_000)
    assert reserved(h, "a", "p") == 2_000 + OUTPUT_RESERVED_MAX_TOKENS
    h.arrive("p", prompt_tokens=10, max_output_tokens=-5)
    assert reserved(h, "a", "p") == 2_000 + OUTPUT_RESERVED_MAX_TOKENS


def test_l5_check_sees_a_turn_that_has_outgrown_its_reservation():
    """Covered, but not by enough."""
    h = Host(make_stack(backend("a", kv_tokens=100_000), expected_tokens=500))
    h.arrive("p", prompt_tokens=2_000)
    broken(h, "L5", lambda router: router.admission.ledger.extend("p", "a", 1_999))


def test_l5_reservation_that_nobody_owns_is_seen():
    """A key without its program or turn."""
    h = Host(make_stack(backend("a", slots=2)))
    broken(h, "L5", lambda router: router.admission.ledger.reserve("nobody", "a", 1, at_s=0.0))


def test_l6_same_seed_same_bytes():
    """The same course twice: the same commands and the same state, to the last bit."""
    options = {"policy": PolicySpec(name="lints"), "replica_policy": PolicySpec(name="power_of_two")}
    first, second = (busy_host(**options) for _ in range(2))
    assert first.stack.dump() == second.stack.dump()
    assert encoded(list(first.decided.values())) == encoded(list(second.decided.values()))


def test_l9_head_is_never_held_while_it_fits():
    """Whatever frees something starts who waits, within the same event; `Host.send` checks after each."""
    assert sum(busy_host(seed=seed).router.counts.held for seed in range(10)) > 20
    h = Host(make_stack(backend("a", slots=1)))
    h.serve("p")
    h.arrive("q")

    def free(router):
        program = router.table.by_id[ProgramId("p")]
        router.admission.ledger.release("p", "a")
        program.is_reserved = False

    broken(h, "L9", free)


def test_l9_empty_backend_admits_its_head():
    """Or a program larger than the limit would wait for ever."""
    h = Host(make_stack(backend("a", kv_tokens=10)))
    find(h.arrive("p", prompt_tokens=10**6), c.Dispatch)


@pytest.mark.parametrize("how", ["down", "quiet", "cooling"])
def test_l9_who_has_a_place_does_not_stand_behind_who_waits_for_it(how):
    """The head waits for the slot that the second in line holds: when the backend comes back, the second goes first."""
    h = Host(make_stack(backend("a", slots=1)))
    h.serve("p")
    h.arrive("head")
    h.arrive("p")
    h.end_attempt(3, *{"down": ("completed",), "quiet": ("status",), "cooling": ("refused",)}[how], status=429)
    if how == "down":
        h.set_health("a", BackendHealth.DOWN)
    h.arrive("p")
    assert h.router.admission.n_held == 2 and not h.running
    commands = h.set_health("a", BackendHealth.UP) if how == "down" else h.after(1.0).wake()
    find(commands, c.Dispatch, program_id="p", turn_id=4)
    h.end_attempt(4)
    find(h.finish("p"), c.Dispatch, program_id="head")


def test_l9_check_sees_a_turn_that_waits_for_its_own_place():
    """Behind a head that does not fit."""
    h = Host(make_stack(backend("a", slots=1)))
    h.serve("p")
    h.arrive("head")
    h.set_health("a", BackendHealth.DOWN)
    h.arrive("p")
    broken(h, "L9", lambda router: setattr(router.backends.by_id[BackendId("a")], "health", BackendHealth.UP))


def test_l9_siblings_follow_their_program_to_another_place():
    """A program that moves takes its held turns along."""
    h = Host(make_stack(backend("a", slots=1), backend("b", slots=1)))
    for name in ("p", "q"):
        h.serve(name)
    h.set_health("a", BackendHealth.DOWN)
    h.arrive("head")
    for name in ("p", "other", "p"):
        h.arrive(name)
    commands = h.finish("q")
    find(commands, c.Dispatch, program_id="head", backend_id="b")
    h.end_attempt(3)
    h.finish("head")
    assert sorted(h.running) == [4, 6]


def test_l10_stale_signal_is_unknown():
    """It is not in the record of the decision, rather than there with a zero."""
    h = Host(make_stack(backend("a"), signal_max_age_s=5.0))
    h.send(e.SignalsObserved(at_s=0.0, backend_id="a", values={"running": 0.0}, observed_at_s=0.0))
    fresh = find(h.after(5.0).arrive("p"), c.RecordDecision).candidates[0].signals
    stale = find(h.after(0.1).arrive("q"), c.RecordDecision).candidates[0].signals
    assert fresh == {"a/running": Signal(value=0.0, observed_at_s=0.0)} and stale == {}


def test_l11_verdict_is_credited_at_most_once():
    """In any number and order; the host's account refuses a second credit of one decision."""
    h = Host(make_stack(backend("a")))
    for n in range(5):
        h.serve(f"p{n}")
    for n in (3, 1, 3, 0, 4, 2, 3, 0):
        h.judge(f"p{n}")
    assert set(h.credited) == {1, 2, 3, 4, 5} and h.router.credit.n_landed == 5
    assert h.router.counts.verdicts_stale == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda router: router.credit.pending_by_decision.clear(),
        lambda router: setattr(router.table.by_id[ProgramId("p")], "is_credited", True),
        lambda router: setattr(router.credit.pending_by_decision[DecisionId(1)], "model", ModelId("large")),
        lambda router: setattr(router.table.by_id[ProgramId("p")], "decision_id", DecisionId(9)),
    ],
)
def test_l11_check_sees_credit_that_went_astray(spoil):
    """Lost, double, for another model, for another decision."""
    h = Host(make_stack(backend("a")))
    h.serve("p")
    h.finish("p")
    broken(h, "L11", spoil)


LIMITS = {"held_max": 5, "turns_max": 40, "programs_max": 20, "verifying_max": 10, "closed_max": 15}


def n_entries(value, seen):
    """How many entries all containers reachable from an object hold."""
    if id(value) in seen or isinstance(value, str | bytes | int | float | type(None)):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(n_entries(item, seen) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) + sum(n_entries(item, seen) for item in value)
    if type(value).__module__.startswith("loadwise"):
        names = getattr(value, "__struct_fields__", None) or getattr(type(value), "__slots__", None)
        items = [getattr(value, name) for name in names] if names else vars(value).values()
        return sum(n_entries(item, seen) for item in items)
    return 0


def test_l15_no_queue_or_map_grows_with_the_number_of_programs():
    """The same course of programs again and again, each under a new name: all containers together keep their size."""
    h = Host(make_stack(backend("a", slots=3), backend("b", "large", requests_per_minute=30), **LIMITS))
    h.stack.check = lambda: None  # the sizes are what is looked at; the laws are checked at the end
    sizes = []
    for n in range(1500):
        name = f"p{n}"
        h.after(1.0).arrive(name)
        if h.n_turns in h.running:
            h.end_attempt(h.n_turns, "completed" if n % 7 else "broken")
        if n % 3:
            h.finish(name)
        if n % 2:
            h.judge(f"p{n - 5}", "pass")
        h.archived.clear()
        if n >= 500:
            sizes.append(n_entries(h.router.desk, set()))
    h.router.check()
    assert h.router.counts.arrived == 1500
    assert max(sizes[500:]) <= max(sizes[:500]) * 1.02, "it grew"
    assert max(sizes) < 8000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda router: router.agenda.cancel("hold:2"),
        lambda router: router.agenda.schedule("idle:nobody", 9.0),
        lambda router: router.agenda.schedule("verdict:p", 9.0),
        lambda router: router.table.idle.update({ProgramId("p"): None}),
        lambda router: router.asked.update({DecisionId(7): ProgramId("nobody")}),
        lambda router: router.pacing.waiting.update({ProgramId("p"): None}),
        lambda router: setattr(router.admission, "n_held", 0),
        lambda router: setattr(router.turns[1], "is_held", True),
        lambda router: setattr(router.table.by_id[ProgramId("p")], "asked_decision_id", DecisionId(7)),
    ],
)
def test_l15_check_sees_what_would_wait_for_ever_or_was_left_behind(spoil):
    """A wait without an end, a due without its subject, a list with a stranger."""
    h = Host(make_stack(backend("a", slots=1)))
    h.arrive("p")
    h.arrive("q")
    broken(h, "L15", spoil)


@pytest.mark.parametrize("limit", sorted(LIMITS))
def test_l15_check_sees_a_limit_that_is_passed(limit):
    """Each of the configured ones."""
    h = Host(make_stack(backend("a", slots=1), **LIMITS))
    h.serve("p")
    h.judge("p")
    h.serve("q")
    h.finish("q")
    for name in "rst":
        h.arrive(name)
    h.router.check()
    h.router.desk.config = _Spoiled(h.router.config, limit, 0)
    broken(h, "L15", lambda router: None)


class _Spoiled:
    """A configuration that lies about one limit."""

    def __init__(self, config, name, value):
        self._config, self._name, self._value = config, name, value

    def __getattr__(self, name):
        return self._value if name == self._name else getattr(self._config, name)
