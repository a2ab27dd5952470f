"""Law L4 over whole traces: whatever happens to programs, when all are over nothing is promised any more.

A trace is a short life of a router, drawn from a number: its gate, divert rule, order, replicas, shared caches, budgets
and escalation, and what befalls programs: they answer, fail in every way, are cancelled, retried, parked, judged and
tried again, run out of time or money, are moved when their backend dies, drains, leaves or comes back, and their host
crashes, with or without a snapshot to load. At its end everybody is let go, and every account must be empty: tokens,
slots, calls in flight, promised dollars. `make test` runs a few hundred; `LOADWISE_L4_TRACES=100000`, or the mark
`slow`, the number that the law is stated with.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from router_host import Host, backend, make_stack

from loadwise.kernel import events as e
from loadwise.kernel.pool import BackendSpec
from loadwise.kernel.work import AttemptOutcome, EndReason, Usage
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import (
    AdmissionConfig,
    DivertConfig,
    EscalationConfig,
    FeedbackConfig,
    OrderConfig,
    PauseConfig,
    SelectorConfig,
)

N_TRACES = int(os.environ.get("LOADWISE_L4_TRACES", "300"))
ADMISSIONS = (
    AdmissionConfig(call_ratio=0.95, overhead_tokens=100, learns_overhead=True, shares_prompts=True),
    AdmissionConfig(capacity="calibrated", learns_overhead=True),
    AdmissionConfig(kind="footprint", call_ratio=0.95),
    AdmissionConfig(kind="footprint", capacity="calibrated", shares_prompts=True),
    AdmissionConfig(kind="cap", programs_max=2, programs_max_by_model={"large": 1}),
    AdmissionConfig(kind="pause", pause=PauseConfig(tick_s=2.0)),
    AdmissionConfig(kind="pause", pause=PauseConfig(tick_s=1.0, wait_max_s=30.0, state_tokens=200, headroom_ratio=0.1)),
    AdmissionConfig(kind="none"),
)
DIVERTS = (
    DivertConfig(),
    DivertConfig(when="arrival"),
    DivertConfig(when="arrival", saturation="soft", prices_run=True),
    DivertConfig(when="held", forecast="elapsed", rebinds=True),
    DivertConfig(when="held", saturation="none", forecast="elapsed", prices_run=True, rebinds=True),
)
ESCALATIONS = (
    None,
    None,
    EscalationConfig(optimism=9.0),
    EscalationConfig(attempts_max=4, optimism=9.0, turns_max=2, failed_turns_max=1, stall_s=40.0),
)
CAPACITIES: tuple[dict[str, int], ...] = (
    {"kv_tokens": 4000},
    {"kv_tokens": 9000},
    {"slots": 2},
    {"requests_per_minute": 3},
    {},
)
OUTCOMES = [outcome for outcome in AttemptOutcome if outcome is not AttemptOutcome.COMPLETED]
MOMENTS_S = (0.0, 0.0, 0.1, 1.0, 10.0, 70.0)
FAR_S = 1e5
"""Beyond every time limit of a trace."""
WHATS = {
    "arrive": 12,
    "answer": 9,
    "fail": 5,
    "abandon": 2,
    "finish": 3,
    "judge": 3,
    "wake": 2,
    "tick": 4,
    "health": 2,
    "crash": 0.3,
    "reload": 0.5,
    "remove": 0.3,
    "add": 0.5,
    "read": 2,
    "select": 1,
    "told": 1,
}


class Life:
    """One trace."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        pool = rng.choice([None, "gpu"])
        shared = {} if pool is None else {"kv_pool": pool}
        self.backends: list[BackendSpec] = [
            backend("a", kv_tokens=4000, **shared),
            backend("b", "large", kv_tokens=6000, **shared),
            backend("c", rng.choice(["small", "large"]), **rng.choice(CAPACITIES)),
            backend("d", rng.choice(["small", "large"]), **rng.choice(CAPACITIES)),
        ][: rng.randint(2, 4)]
        self.settings: dict[str, Any] = {
            "policy": PolicySpec(name=rng.choice(["linucb", "random", "least_loaded", "lints"])),
            "replica_policy": PolicySpec(name=rng.choice(["resident", "power_of_two", "round_robin"])),
            "admission": rng.choice(ADMISSIONS),
            "divert": rng.choice(DIVERTS),
            "order": OrderConfig(kind=rng.choice(["fifo", "fair"]), age_s=30.0),
            "escalation": rng.choice(ESCALATIONS),
            "feedback": FeedbackConfig(arm=rng.choice(["delayed"] * 4 + ["batch_sync", "per_slot"]), size=2),
            "selector": rng.choice([None, None, None, SelectorConfig(url="http://selector", timeout_s=2.0)]),
            "expected_tokens": rng.choice([200, 900]),
            "hold_max_s": rng.choice([20.0, 60.0, 300.0]),
            "idle_s": rng.choice([60.0, 900.0]),
            "park_s": rng.choice([5.0, 120.0]),
            "verdict_max_s": rng.choice([30.0, 3600.0]),
            "budget_s": rng.choice([None, 50.0]),
            "budget_starts": rng.choice(["arrival", "admission"]),
            "budget_credit": rng.choice(["fail", "censor"]),
            "budget_usd_per_h": rng.choice([None, None, 10.0, 0.01]),
            "attempts_max": rng.choice([1, 3]),
            "programs_max": rng.choice([100, 3]),
            "held_max": rng.choice([100, 2]),
        }
        self.host = Host(self._stack())

    def run(self, seen: Counter[str]) -> None:
        """Live it, and let go."""
        rng, h = self.rng, self.host
        for _ in range(rng.randint(5, 40)):
            h.after(rng.choice(MOMENTS_S))
            (what,) = rng.choices(list(WHATS), list(WHATS.values()))
            getattr(self, f"_{what}")()
        seen[self.settings["admission"].kind] += 1
        counts = h.router.counts
        for name in ("held", "diverts", "pauses", "rebinds", "escalated", "escalated_stuck", "over_budget"):
            seen[name] += getattr(counts, name, 0)
        let_go(h)

    def _stack(self) -> Any:
        return make_stack(*self.backends, verifiers={"code": "command"}, **self.settings)

    # --- what happens ---

    def _arrive(self) -> None:
        rng = self.rng
        self.host.arrive(
            f"p{rng.randrange(6)}",
            model=rng.choice(["auto", "auto", "auto", "small"]),
            prompt_tokens=rng.choice([50, 600, 3000]),
            max_output_tokens=rng.choice([None, 300]),
            tenant=rng.choice("xy"),
            task_type=rng.choice([None, "code"]),
            is_final=rng.random() < 0.05,
            is_implicit=rng.random() < 0.1,
        )

    def _answer(self) -> None:
        running = sorted(self.host.running)
        if running:
            tokens = self.rng.choice([50, 600, 3000, 5000])
            usage = Usage(prompt_tokens=tokens, completion_tokens=100, cached_tokens=40)
            self.host.end_attempt(self.rng.choice(running), usage=usage)

    def _fail(self) -> None:
        running, rng = sorted(self.host.running), self.rng
        if running:
            began_at_s = rng.choice([None, self.host.now_s])
            outcome, status = rng.choice(OUTCOMES).value, rng.choice([429, 500, 503, 400])
            self.host.end_attempt(rng.choice(running), outcome, status=status, first_byte_at_s=began_at_s)

    def _abandon(self) -> None:
        if self.host.open:
            self.host.abandon(self.rng.choice(sorted(self.host.open)))

    def _finish(self) -> None:
        self.host.finish(f"p{self.rng.randrange(6)}", self.rng.choice(list(EndReason)))

    def _judge(self) -> None:
        self.host.judge(f"p{self.rng.randrange(6)}", self.rng.choice(["pass", "fail", "fail", "abstain"]))

    def _wake(self) -> None:
        self.host.wake()

    def _tick(self) -> None:
        on_time(self.host)

    def _health(self) -> None:
        self.host.set_health(self._name(), self.rng.choice(["up", "down", "draining"]))

    def _crash(self) -> None:
        self.host.send(e.HostRestarted(at_s=self.host.now_s))

    def _reload(self) -> None:
        """The host dies; the next one loads a snapshot, and what ran is lost."""
        h = self.host
        stack = self._stack()
        stack.load(h.stack.dump())
        h.stack, h.router = stack, stack.machine_by_name["router"]
        self._crash()

    def _remove(self) -> None:
        self.host.send(e.BackendRemoved(at_s=self.host.now_s, backend_id=self._name()))

    def _add(self) -> None:
        spec = self.rng.choice(self.backends)
        self.host.send(e.BackendAdded(at_s=self.host.now_s, backend=spec))

    def _read(self) -> None:
        rng, h = self.rng, self.host
        values = {"n_running": float(rng.randrange(9)), "kv_usage_ratio": rng.random()}
        if rng.random() < 0.3:
            values["kv_tokens"] = rng.choice([2000.0, 8000.0])
        h.send(e.SignalsObserved(at_s=h.now_s, backend_id=self._name(), values=values, observed_at_s=h.now_s))

    def _select(self) -> None:
        h = self.host
        if h.asked:
            decision_id = self.rng.choice(sorted(h.asked))
            h.asked.pop(decision_id)
            model = self.rng.choice([None, "small", "large"])
            h.send(e.SelectorAnswered(at_s=h.now_s, decision_id=decision_id, model=model))

    def _told(self) -> None:
        tell_ends(self.host)

    def _name(self) -> Any:
        return self.rng.choice(self.backends).name


def on_time(h: Host) -> None:
    """The timer fires when it is due, if one is set."""
    if h.timer_at_s is not None:
        h.now_s = max(h.now_s, h.timer_at_s)
        h.wake()


def tell_ends(h: Host) -> None:
    """The host says how the attempts ended that it was told to take back."""
    for turn_id, gone in list(h.router.desk.called_off.items()):
        h.send(e.AttemptEnded(at_s=h.now_s, turn_id=turn_id, attempt=gone.attempt, outcome=AttemptOutcome.CANCELLED))


def let_go(h: Host) -> None:
    """Every attempt ends, every program is cancelled; then nothing is promised, now or later."""
    while h.running:
        h.end_attempt(min(h.running))
    for program_id in list(h.router.table.by_id):
        h.finish(program_id, EndReason.CANCELLED)
    tell_ends(h)
    assert_nothing_is_promised(h)
    # Nor does anything come back with what was still due: verdicts, parking, retries, ticks.
    for _ in range(6):
        h.after(FAR_S).wake()
    assert_nothing_is_promised(h)
    assert not h.router.credit.pending_by_decision and not h.router.table.by_id


def assert_nothing_is_promised(h: Host) -> None:
    """No account holds anything."""
    router = h.router
    for name, account in router.admission.ledger.account_by_backend.items():
        assert account.reserved == 0 and not account.amount_by_key, name
        state = router.backends.by_id[name]
        assert state.load.n_calls == state.load.tokens == state.n_running == 0, name
    assert router.admission.n_held == 0 and not router.turns
    assert router.spending.purse is None or not router.spending.purse.open


def lived(n_traces: int, *, has_seen: tuple[str, ...]) -> None:
    """Live so many lives; what holds or moves tokens must have happened among them."""
    seen: Counter[str] = Counter()
    for number in range(n_traces):
        Life(number).run(seen)
    for what in has_seen:
        assert seen[what] > 0, (what, seen)


SEEN = ("ledger", "footprint", "cap", "pause", "none", "held", "diverts", "pauses", "escalated", "over_budget")


def test_l4_no_trace_leaks_a_token() -> None:
    """Lives under every gate, divert rule and order."""
    lived(N_TRACES, has_seen=SEEN)


@pytest.mark.slow
def test_l4_a_hundred_thousand_traces_leak_nothing() -> None:
    """The law as it is stated."""
    lived(100_000, has_seen=(*SEEN, "rebinds", "escalated_stuck"))
