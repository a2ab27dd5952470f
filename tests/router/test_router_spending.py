"""A hard budget of dollars an hour: no rolling hour costs more, and what does not fit is told so at once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_host import Host, backend, encoded, find, kinds, make_stack

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError, LawBroken
from loadwise.kernel.pool import ModelSpec, Price
from loadwise.kernel.work import Usage
from loadwise.policy.purse import WINDOW_S
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import EscalationConfig, RouterConfig

MODELS = {
    "free": ModelSpec(),
    "small": ModelSpec(usd_per_million=Price(input=100.0, output=400.0, cached_input=10.0)),
    "large": ModelSpec(usd_per_million=Price(input=1000.0, output=4000.0)),
}
"""A thousand tokens of answer cost 0, 40 cents, 4 dollars."""
PAIR = {name: MODELS[name] for name in ("small", "large")}
ALWAYS_LARGE = PolicySpec(name="mixing", options={"weights": {"large": 1.0, "small": 0.0}})
SMALL, LARGE = backend("s", "small", slots=2), backend("l", "large", slots=8)


def open_host(budget: float | None, *backends, models=PAIR, **router) -> Host:
    """A host under a budget."""
    return Host(make_stack(*(backends or (SMALL, LARGE)), models=models, budget_usd_per_h=budget, **router))


def used(prompt_tokens: int, completion_tokens: int, **more) -> Usage:
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, **more)


def refusal(commands) -> c.EndTurn:
    """The one answer of a turn that does not fit."""
    return find(commands, c.EndTurn, status=429, code="dollar_budget_exceeded")


def purse(host: Host):
    return host.router.desk.spending.purse


def test_without_a_budget_nothing_is_kept():
    """Off by default, and nothing of it in a dump."""
    host = open_host(None)
    host.serve()
    assert purse(host) is None and host.router.desk.spending.dump() is None


def test_models_that_do_not_fit_are_no_candidates():
    """The decision says which were left out."""
    host = open_host(1.0)
    decision = find(host.arrive(prompt_tokens=1000, max_output_tokens=1000), c.RecordDecision)
    assert [view.candidate for view in decision.candidates] == ["small"]
    assert decision.unaffordable == ("large",)
    assert purse(host).promised_usd == 0.5


def test_what_fits_nowhere_is_refused_at_once_and_told_when_to_come_back():
    """429 that names budget and window; no trace is left, nothing waits."""
    host = open_host(1.0)
    host.arrive("a", prompt_tokens=1000, max_output_tokens=1000)
    host.after(10.0).end_attempt(1, usage=used(1000, 1000))
    host.after(90.0)
    said = refusal(host.arrive("b", prompt_tokens=2000, max_output_tokens=1000))
    assert said.retry_after_s == WINDOW_S - 90.0
    assert "budget of 1 USD per rolling hour 0.5 USD are left" in said.message and "may cost 0.6 USD" in said.message
    assert host.router.counts.over_budget == 1 and "b" not in host.router.table.by_id
    host.after(said.retry_after_s)
    assert "Dispatch" in kinds(host.arrive("b", prompt_tokens=2000, max_output_tokens=1000))


def test_money_that_open_turns_hold_comes_back_when_they_end():
    """Then nobody knows when, so the client is asked to come back soon; the promise becomes what it cost."""
    host = open_host(1.0, SMALL)
    host.arrive("a", prompt_tokens=1000, max_output_tokens=2000)
    said = refusal(host.arrive("b", prompt_tokens=1000, max_output_tokens=1000))
    assert said.retry_after_s == 1.0
    host.end_attempt(1, usage=used(1000, 10))
    assert purse(host).promised_usd == 0.0 and purse(host).spent_usd(host.now_s) == pytest.approx(0.104)
    assert "Dispatch" in kinds(host.arrive("b", prompt_tokens=1000, max_output_tokens=1000))


def test_a_turn_that_can_never_fit_is_told_so():
    """Its worst case is dearer than an hour's budget."""
    said = refusal(open_host(1.0).arrive(prompt_tokens=1000, max_output_tokens=64_000))
    assert "never fits" in said.message and said.retry_after_s == WINDOW_S


def test_a_model_that_costs_nothing_is_never_refused():
    """Not with a budget of nothing, and not when more was spent than there was."""
    host = open_host(0.0, SMALL, backend("f", "free"), models=MODELS)
    assert find(host.arrive(), c.RecordDecision).chosen == "free"
    host = open_host(0.1, SMALL, backend("f", "free"), models=MODELS)
    host.arrive("a", model="small", max_output_tokens=100)
    host.end_attempt(1, usage=used(100_000, 100))
    assert purse(host).left_usd(host.now_s) < 0.0
    assert find(host.arrive("b"), c.RecordDecision).chosen == "free"


def test_an_overshoot_stays_in_the_window():
    """An engine that counts more than was promised makes others wait for longer."""
    host = open_host(1.0, SMALL)
    host.arrive("a", prompt_tokens=10, max_output_tokens=10)
    host.end_attempt(1, usage=used(10, 5000))
    assert purse(host).left_usd(host.now_s) == pytest.approx(-1.001)
    refusal(host.after(3599.0).arrive("b", max_output_tokens=1))
    assert "Dispatch" in kinds(host.after(1.0).arrive("b", max_output_tokens=1))


def test_later_turns_of_a_program_are_held_to_the_budget_too():
    """The program stays open, bound to its model; its context counts where the estimate is shorter."""
    host = open_host(1.0, SMALL)
    host.arrive(prompt_tokens=100, max_output_tokens=500)
    host.end_attempt(1, usage=used(3000, 500))
    said = refusal(host.arrive(prompt_tokens=100, max_output_tokens=500))
    assert "may cost 0.55 USD" in said.message
    assert said.retry_after_s == WINDOW_S and host.router.table.by_id["p"].is_open
    assert not host.router.table.by_id["p"].is_reserved
    host.after(WINDOW_S - 1.0).wake()
    assert "Dispatch" in kinds(host.after(1.0).arrive(prompt_tokens=100, max_output_tokens=500))


def test_a_named_model_that_does_not_fit_is_refused():
    """No other is taken in its stead."""
    host = open_host(1.0)
    refusal(host.arrive(model="large", max_output_tokens=1000))
    host.serve(model="small", max_output_tokens=10)
    refusal(host.arrive(model="large", max_output_tokens=1000))
    assert purse(host).promised_usd == 0.0


@pytest.mark.parametrize(("n_answers", "usd"), [(1, 0.44), (2, 0.84), (0, 0.44), (-5, 0.44)])
def test_each_answer_asked_for_is_promised(n_answers, usd):
    """`n` answers of a thousand tokens, one prompt."""
    host = open_host(10.0, SMALL)
    host.arrive(prompt_tokens=400, max_output_tokens=1000, n_answers=n_answers)
    assert purse(host).promised_usd == pytest.approx(usd)


def test_without_a_limit_of_the_client_the_configured_answer_is_promised():
    """Never longer than the model's context."""
    host = open_host(10.0, SMALL, budget_output_tokens=2000)
    host.arrive()
    assert purse(host).promised_usd == 0.8
    short = {"small": ModelSpec(usd_per_million=Price(output=400.0), context_tokens=500)}
    host = open_host(10.0, SMALL, models=short)
    host.arrive(max_output_tokens=64_000)
    assert purse(host).promised_usd == 0.2


@pytest.mark.parametrize(
    ("outcome", "fields", "usd"),
    [
        ("completed", {"usage": used(500, 10)}, 0.054),
        ("completed", {"usage": used(500, 10, cached_tokens=500)}, 0.009),
        ("completed", {"usage": used(0, 100, is_exact=False)}, 0.14),
        ("cancelled", {"usage": used(500, 10)}, 0.054),
        ("cancelled", {}, 0.5),
        ("cancelled", {"usage": used(0, 10, is_exact=False)}, 0.5),
        ("broken", {"first_byte_at_s": 0.0}, 0.5),
        ("completed", {"usage": used(10**9, 10)}, 0.5),
        ("status", {"status": 400}, 0.0),
        ("status", {"status": 500}, 0.0),
        ("refused", {}, 0.0),
    ],
)
def test_what_nobody_counted_has_cost_its_promise(outcome, fields, usd):
    """Unless it never began, or its answer is whole: then the estimate stands."""
    host = open_host(10.0, SMALL, attempts_max=1, fallbacks_max=0)
    host.arrive(prompt_tokens=1000, max_output_tokens=1000)
    host.end_attempt(1, outcome, **fields)
    assert purse(host).spent_usd(host.now_s) == pytest.approx(usd)
    assert purse(host).promised_usd == 0.0


def test_an_attempt_that_was_taken_back_is_settled_when_it_is_told_or_lost():
    """The engine may work on: until then its promise stands."""
    host = open_host(10.0, SMALL)
    for n in (1, 2):
        host.arrive(str(n), prompt_tokens=1000, max_output_tokens=1000)
        host.abandon(n)
    assert purse(host).promised_usd == 1.0
    host.end_attempt(1, "cancelled", usage=used(1000, 10))
    assert (purse(host).promised_usd, purse(host).spent_usd(host.now_s)) == (0.5, pytest.approx(0.104))
    host.send(e.HostRestarted(at_s=host.now_s))
    assert (purse(host).promised_usd, purse(host).spent_usd(host.now_s)) == (0.0, pytest.approx(0.604))


def test_a_turn_that_waits_for_a_place_keeps_its_promise():
    """It gives it back when it leaves, and starts under it when a place comes free."""
    host = open_host(1.2, backend("s", "small", slots=1))
    for n in (1, 2):
        host.arrive(str(n), max_output_tokens=1000)
    assert host.router.admission.n_held == 1 and purse(host).promised_usd == 0.8
    refusal(host.arrive("3", max_output_tokens=2000))
    host.end_attempt(1, usage=used(0, 1000))
    host.finish("1")
    assert 2 in host.running
    host.arrive("4", max_output_tokens=100)
    host.abandon(3 + 1)
    assert purse(host).promised_usd == pytest.approx(0.4)


def test_another_try_is_promised_anew_and_a_cheaper_model_may_take_over():
    """The first attempt broke off and may have cost all it was promised; a second one no longer fits."""
    host = open_host(6.0, policy=ALWAYS_LARGE)
    assert find(host.arrive(max_output_tokens=1000), c.RecordDecision).chosen == "large"
    commands = host.end_attempt(1, "broken")
    fallback = find(commands, c.RecordDecision)
    assert (fallback.chosen, fallback.reason) == ("small", "fallback")
    assert find(commands, c.Dispatch).model == "small"


def test_no_further_attempt_is_offered_that_there_is_no_money_for():
    """Escalation looks at the purse as well."""
    for budget, is_offered in ((60.0, True), (1.0, False)):
        host = open_host(budget, escalation=EscalationConfig(optimism=9.0), budget_output_tokens=1000)
        host.serve(max_output_tokens=100, prompt_tokens=100, model="auto", is_final=True)
        assert host.router.table.by_id["p"].model == "small"
        host.judge(verdict="fail")
        assert host.router.table.by_id["p"].is_open is is_offered


def test_l5_a_promise_belongs_to_one_turn():
    """A spoiled state is noticed."""
    host = open_host(1.0, SMALL)
    host.arrive(max_output_tokens=10)
    host.router.turns[1].promise = ""
    with pytest.raises(LawBroken, match="L5"):
        host.router.check()


@pytest.mark.parametrize("budget", [-1.0, math.nan, math.inf, 1e10])
def test_a_budget_is_a_number_of_dollars(budget):
    """Zero is one: only models that cost nothing."""
    with pytest.raises(ConfigError, match="budget_usd_per_h"):
        RouterConfig(budget_usd_per_h=budget)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from("abcd"), st.sampled_from([100, 1500]), st.integers(300, 1500)),
        st.tuples(st.just("arrive"), st.sampled_from("efgh"), st.sampled_from([0, 100]), st.integers(0, 900)),
        st.tuples(st.just("end"), st.integers(0, 7), st.floats(0.0, 1.0), st.sampled_from(["completed", "cancelled"])),
        st.tuples(st.just("fail"), st.integers(0, 7), st.sampled_from(["broken", "refused", "status"]), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 7), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 0.5, 40.0, 700.0, 3599.0]), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0), st.just(0)),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=120, deadline=None)
@given(STEPS, st.sampled_from([0.4, 0.8, 1.3, 2.5, 7.0]))
def test_l5_no_rolling_hour_costs_more_than_the_budget(steps, budget):
    """The engine's own account: each attempt may cost up to its promise, whole at its start or whole at its end.

    A twin goes on from a dump and from what the host says, to the last bit.
    """
    host = open_host(budget, backend("s", "small", slots=1), backend("l", "large", slots=2), closed_s=1e9)
    asked: dict[int, tuple[int, int]] = {}
    begun: dict[tuple[int, int], tuple[float, float]] = {}
    spent: list[tuple[float, float, float]] = []

    def worst(model: str, turn_id: int) -> tuple[int, int, float]:
        prompt_tokens, answer_tokens = asked[turn_id]
        price = PAIR[model].usd_per_million
        return prompt_tokens, answer_tokens, (prompt_tokens * price.input + answer_tokens * price.output) / 1e6

    def heard(commands: list[c.Command]) -> None:
        for command in commands:
            if type(command) is c.Dispatch:
                usd = worst(command.model, command.turn_id)[2]
                begun[command.turn_id, command.attempt] = (host.now_s, usd)

    def over(turn_id: int, attempt: int, share: float) -> None:
        began_s, usd = begun.pop((turn_id, attempt))
        spent.append((began_s, host.now_s, usd * share))

    for kind, a, b, tokens in steps:
        running = sorted(host.running)
        if kind == "pass":
            host.now_s += a
        elif kind == "arrive":
            asked[host.n_turns + 1] = (b, tokens)
            heard(host.arrive(a, prompt_tokens=b, max_output_tokens=tokens))
        elif kind == "restart":
            other = make_stack(
                backend("s", "small", slots=1),
                backend("l", "large", slots=2),
                models=PAIR,
                budget_usd_per_h=budget,
                closed_s=1e9,
            )
            other.load(host.stack.dump())
            event = e.HostRestarted(at_s=host.now_s)
            assert encoded(host.send(event)) == encoded(other.handle(event))
            assert other.dump() == host.stack.dump()
            for turn_id, attempt in list(begun):
                over(turn_id, attempt, 1.0)
        elif running:
            turn_id = running[a % len(running)] if isinstance(a, int) else running[0]
            dispatch = host.running[turn_id]
            if kind == "leave":
                heard(host.abandon(turn_id))  # never told how it ended: its money may be gone at any time
            elif kind == "fail":
                over(turn_id, dispatch.attempt, 1.0 if b == "broken" else 0.0)
                heard(host.end_attempt(turn_id, b, status=500 if b == "status" else 0))
            else:
                prompt_tokens, answer_tokens, _ = worst(dispatch.model, turn_id)
                usage = used(prompt_tokens, int(answer_tokens * b))
                price = PAIR[dispatch.model].usd_per_million
                usd = (usage.prompt_tokens * price.input + usage.completion_tokens * price.output) / 1e6
                began_s, most = begun.pop((turn_id, dispatch.attempt))
                is_told = tokens == "completed" or prompt_tokens > 0
                spent.append((began_s, host.now_s, usd if is_told else most))
                heard(host.end_attempt(turn_id, tokens, usage=usage))
    for turn_id, attempt in list(begun):
        over(turn_id, attempt, 1.0)
    for when in (0, 1):
        for entry in spent:
            at_s = entry[when]
            within = math.fsum(usd for *moments, usd in spent if at_s - WINDOW_S < moments[when] <= at_s)
            assert within <= budget + 1e-9
