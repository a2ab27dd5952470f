"""Law L4 where programs are paused: crowds in caches that lose contexts, under the gates that relieve them.

Lives as in `test_l4_no_leak`, but longer, of more programs whose contexts grow, in caches that find them or do not; and
hasty, so that few answers make a cache thrash.
"""

from collections import Counter

import pytest
from router_host import Host, backend
from test_l4_no_leak import N_TRACES, WHATS, Life, let_go

from loadwise.kernel.work import Usage
from loadwise.ledger import residency
from loadwise.router.config import AdmissionConfig, FeedbackConfig

RELIEVING = (
    AdmissionConfig(kind="footprint", call_ratio=0.95, footprint_ratio=1.0, heeds_budget=False),
    AdmissionConfig(kind="footprint", call_ratio=0.5, footprint_ratio=0.9),
    AdmissionConfig(kind="footprint", footprint_ratio=1.0, shares_prompts=True),
    AdmissionConfig(kind="footprint", reserves=True, call_ratio=0.95),
)
CROWDED_WHATS = {**WHATS, "arrive": 30, "answer": 25, "fail": 1, "abandon": 1, "finish": 1, "judge": 1, "select": 0}


class Crowd(Life):
    """One trace of it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        rng = self.rng
        shared = rng.choice([{}, {"kv_pool": "gpu"}])
        self.backends = [
            backend("a", kv_tokens=rng.choice([6000, 10_000]), **shared),
            backend("b", rng.choice(["large", "small"]), kv_tokens=10_000, **shared),
            backend("c", "large", **rng.choice([{"kv_tokens": 8000}, {"slots": 2}, {"requests_per_minute": 3}])),
        ][: rng.randint(1, 3)]
        self.settings |= {
            "admission": rng.choice(RELIEVING),
            "feedback": FeedbackConfig(),
            "selector": None,
            "programs_max": 100,
            "expected_tokens": rng.choice([200, 600]),
            "hold_max_s": rng.choice([15.0, 60.0]),
            "idle_s": 900.0,
            "budget_s": rng.choice([None, None, 120.0]),
            "budget_usd_per_h": None,
        }
        self.host = Host(self._stack())
        self.n_programs = rng.choice([6, 14, 20])
        self.lost_share = rng.choice([0.1, 0.3, 0.6])

    def _arrive(self) -> None:
        rng, name = self.rng, f"p{self.rng.randrange(self.n_programs)}"
        known = self.host.router.table.by_id.get(name)
        context_tokens = 0 if known is None else known.context_tokens
        prompt_tokens = max(context_tokens, 300) + rng.choice([0, 50])
        model = rng.choice(["auto"] * 9 + ["small"])
        self.host.arrive(name, model=model, prompt_tokens=prompt_tokens, tenant=rng.choice("xy"))

    def _answer(self) -> None:
        rng, h = self.rng, self.host
        for turn_id in sorted(h.running)[: rng.choice([1, 3, 99])]:
            if turn_id in h.running:
                tokens = h.router.turns[turn_id].prompt_tokens
                cached_tokens = 0 if rng.random() < self.lost_share else rng.choice([tokens, tokens, 10**9])
                usage = Usage(prompt_tokens=tokens, completion_tokens=rng.choice([0, 100]), cached_tokens=cached_tokens)
                h.end_attempt(turn_id, usage=usage)

    def run(self, seen: Counter[str]) -> None:
        """Live it, and let go."""
        rng, h = self.rng, self.host
        for _ in range(rng.randint(60, 250)):
            h.after(rng.choice([0.0, 0.1, 1.0, 5.0, 20.0]))
            (what,) = rng.choices(list(CROWDED_WHATS), list(CROWDED_WHATS.values()))
            getattr(self, f"_{what}")()
            seen["held"] += any(h.router.turns[turn_id].is_paused for turn_id in h.router.turns)
        for name in ("pauses", "rebinds", "escalated", "evicted", "completed"):
            seen[name] += getattr(h.router.counts, name)
        let_go(h)


def crowded(n_traces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live so many; somebody must have been paused, and held for it."""
    monkeypatch.setattr(residency, "MEMORY", 4)
    monkeypatch.setattr(residency, "PATIENCE_ROUNDS", 1)
    seen: Counter[str] = Counter()
    for number in range(n_traces):
        Crowd(number).run(seen)
    assert min(seen["pauses"], seen["held"], seen["completed"]) > 0, seen


def test_l4_no_pause_leaks_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is paused, in the middle of a call or between two, gets its place back, or leaves none behind."""
    crowded(max(N_TRACES // 3, 100), monkeypatch)


@pytest.mark.slow
def test_l4_three_thousand_crowds_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same at length."""
    crowded(3000, monkeypatch)
