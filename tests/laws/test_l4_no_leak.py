"""Law L4 over whole traces: whatever happens to programs, when all are over nothing is promised any more.

A trace is a short life of a router: programs arrive, answer, fail in every way, are cancelled, retried, run out of time
or are killed with their host; at its end everybody is let go, and every account must be empty. `make test` runs a few
hundred; `LOADWISE_L4_TRACES=100000`, or the mark `slow`, the number that the law is stated with.
"""

import os
import random

import pytest
from router_host import Host, backend, make_stack

from loadwise.kernel import events as e
from loadwise.kernel.work import AttemptOutcome, EndReason, Usage
from loadwise.policy.registry import PolicySpec
from loadwise.router.config import AdmissionConfig, DivertConfig, OrderConfig, PauseConfig

N_TRACES = int(os.environ.get("LOADWISE_L4_TRACES", "300"))
ADMISSIONS = (
    AdmissionConfig(call_ratio=0.95, overhead_tokens=100, learns_overhead=True, shares_prompts=True),
    AdmissionConfig(kind="footprint", call_ratio=0.95),
    AdmissionConfig(kind="cap", programs_max=2),
    AdmissionConfig(kind="pause", pause=PauseConfig(tick_s=2.0)),
    AdmissionConfig(kind="none"),
)
DIVERTS = (DivertConfig(), DivertConfig(when="arrival"), DivertConfig(when="held", forecast="elapsed", rebinds=True))
OUTCOMES = [outcome for outcome in AttemptOutcome if outcome is not AttemptOutcome.COMPLETED]


def run_trace(number: int) -> None:
    """One life, drawn from its number."""
    rng = random.Random(number)
    pool = None if rng.random() < 0.5 else "gpu"
    backends = [
        backend("a", kv_tokens=4000, **({} if pool is None else {"kv_pool": pool})),
        backend("b", "large", kv_tokens=6000, **({} if pool is None else {"kv_pool": pool})),
        backend("c", rng.choice(["small", "large"]), **rng.choice([{"slots": 2}, {"requests_per_minute": 3}])),
    ]
    h = Host(
        make_stack(
            *backends,
            policy=PolicySpec(name=rng.choice(["linucb", "random", "least_loaded"])),
            admission=rng.choice(ADMISSIONS),
            divert=rng.choice(DIVERTS),
            order=OrderConfig(kind=rng.choice(["fifo", "fair"]), age_s=30.0),
            expected_tokens=rng.choice([200, 900]),
            hold_max_s=rng.choice([20.0, 60.0]),
            budget_s=rng.choice([None, 50.0]),
            budget_starts=rng.choice(["arrival", "admission"]),
        )
    )
    for _ in range(rng.randint(5, 40)):
        h.after(rng.choice([0.0, 0.1, 1.0, 10.0]))
        act(h, rng)
    let_go(h)


def act(h: Host, rng: random.Random) -> None:
    """Something happens."""
    what = rng.choices(
        ["arrive", "answer", "fail", "abandon", "finish", "wake", "health", "crash", "remove", "read"],
        [12, 8, 5, 2, 3, 3, 2, 0.3, 0.2, 2],
    )[0]
    running = sorted(h.running)
    if what == "arrive":
        h.arrive(f"p{rng.randrange(6)}", prompt_tokens=rng.choice([50, 600, 3000]), tenant=rng.choice("xy"))
    elif what == "answer" and running:
        usage = Usage(prompt_tokens=rng.choice([50, 600, 3000]), completion_tokens=100, cached_tokens=40)
        h.end_attempt(rng.choice(running), usage=usage)
    elif what == "fail" and running:
        h.end_attempt(rng.choice(running), rng.choice(OUTCOMES).value, status=rng.choice([429, 500, 503]))
    elif what == "abandon" and h.open:
        h.abandon(rng.choice(sorted(h.open)))
    elif what == "finish":
        h.finish(f"p{rng.randrange(6)}", rng.choice([EndReason.FINISH, EndReason.CANCELLED]))
    elif what == "health":
        h.set_health(rng.choice("abc"), rng.choice(["up", "down", "draining"]))
    elif what == "crash":
        h.send(e.HostRestarted(at_s=h.now_s))
    elif what == "remove":
        h.send(e.BackendRemoved(at_s=h.now_s, backend_id=rng.choice("abc")))
    elif what == "read":
        values = {"n_running": float(rng.randrange(9)), "kv_usage_ratio": rng.random()}
        h.send(e.SignalsObserved(at_s=h.now_s, backend_id=rng.choice("ab"), values=values, observed_at_s=h.now_s))
    else:
        h.wake()


def let_go(h: Host) -> None:
    """Every attempt ends, every program is cancelled; then nothing is promised."""
    for turn_id in sorted(h.running):
        if turn_id in h.running:
            h.end_attempt(turn_id)
    for program_id in list(h.router.table.by_id):
        h.finish(program_id, EndReason.CANCELLED)
    for name, account in h.router.admission.ledger.account_by_backend.items():
        assert account.reserved == 0 and not account.amount_by_key, name
        assert h.router.backends.by_id[name].load.n_calls == h.router.backends.by_id[name].load.tokens == 0
    assert h.router.admission.n_held == 0


def test_l4_no_trace_leaks_a_token() -> None:
    """A few hundred lives under every gate, divert rule and order."""
    for number in range(N_TRACES):
        run_trace(number)


@pytest.mark.slow
def test_l4_a_hundred_thousand_traces_leak_nothing() -> None:
    """The law as it is stated."""
    for number in range(100_000):
        run_trace(number)
