"""What a run amounted to, as byte-stable JSON."""

import msgspec

from loadwise.kernel.fact import Fact
from loadwise.kernel.work import TurnOutcome


class Report(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """One run's results. Equal scenario and seed give equal bytes (law L6)."""

    scenario: str
    seed: int
    elapsed_s: float
    """Until the last program ended."""
    n_events: int
    programs: dict[str, int]
    """By how they ended for their agents: finished, failed, rejected, evicted, cancelled, open."""
    turns: dict[str, int]
    """By outcome, and `open`."""
    verdicts: dict[str, int]
    """Delivered, by kind, and `lost`."""
    success: float | None
    """Share of ended programs that are truly right; None where none ended."""
    cost_usd: float
    programs_per_h: float
    """Finished ones."""
    hold_mean_s: float | None
    """Per dispatched turn: from its arrival to its first dispatch."""
    hold_p95_s: float | None
    hold_max_s: float
    first_token_mean_s: float | None
    """Per turn that got a byte: from its arrival."""
    first_token_p95_s: float | None
    program_mean_s: float | None
    """Per finished program: from its arrival to its end, tools included."""
    program_p95_s: float | None
    share: dict[str, float]
    """Of ended programs that ran anywhere, by the model that ran last."""
    hit_ratio: float | None
    """Prompt tokens found in prefix caches."""
    prompt_tokens: int
    completion_tokens: int
    n_attempts: int
    regret_mean: float | None
    """Per ended program: best model's true success probability minus that of the model that ran."""
    regret_total: float

    def to_json(self) -> bytes:
        """One line of JSON with sorted keys."""
        return msgspec.json.encode(self, order="sorted") + b"\n"


def percentile(values: list[float], ratio: float) -> float | None:
    """Nearest-rank percentile: the least value that at least `ratio` of all do not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    if not values:
        return None
    rank = max(-int(-ratio * len(values) // 1), 1)
    return sorted(values)[rank - 1]


def mean(values: list[float]) -> float | None:
    """Arithmetic mean, or None of nothing."""
    return sum(values) / len(values) if values else None


class Tally:
    """Collects while a world runs."""

    def __init__(self) -> None:
        self.n_programs = 0
        self.n_turns = 0
        self.programs: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.verdicts: dict[str, int] = {}
        self.holds_s: list[float] = []
        self.first_tokens_s: list[float] = []
        self.programs_s: list[float] = []
        self.n_by_model: dict[str, int] = {}
        self.n_solved = 0
        self.regret = 0.0
        self.cost_usd = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.n_attempts = 0
        self.last_end_at_s = 0.0

    def count(self, counts: dict[str, int], key: str) -> None:
        """One more of a kind."""
        counts[key] = counts.get(key, 0) + 1

    def report(self, scenario: str, seed: int, n_events: int) -> Report:
        """The results so far."""
        n_ended = sum(self.programs.values())
        n_ran = sum(self.n_by_model.values())
        turns = {outcome.value: self.turns.get(outcome.value, 0) for outcome in TurnOutcome}
        elapsed_s = self.last_end_at_s
        finished = self.programs.get("finished", 0)
        return Report(
            scenario=scenario,
            seed=seed,
            elapsed_s=elapsed_s,
            n_events=n_events,
            programs=self.programs | {"open": self.n_programs - n_ended},
            turns=turns | {"open": self.n_turns - sum(turns.values())},
            verdicts=self.verdicts,
            success=self.n_solved / n_ended if n_ended else None,
            cost_usd=self.cost_usd,
            programs_per_h=finished * 3600.0 / elapsed_s if elapsed_s > 0 else 0.0,
            hold_mean_s=mean(self.holds_s),
            hold_p95_s=percentile(self.holds_s, 0.95),
            hold_max_s=max(self.holds_s, default=0.0),
            first_token_mean_s=mean(self.first_tokens_s),
            first_token_p95_s=percentile(self.first_tokens_s, 0.95),
            program_mean_s=mean(self.programs_s),
            program_p95_s=percentile(self.programs_s, 0.95),
            share={model: n / n_ran for model, n in self.n_by_model.items()},
            hit_ratio=self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            n_attempts=self.n_attempts,
            regret_mean=self.regret / n_ended if n_ended else None,
            regret_total=self.regret,
        )
