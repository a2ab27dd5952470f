"""How many tokens a program will need at its peak, and how long it will run: means that start from priors worth five.

Besides the means the last values are kept, because a forecast needs to know how they spread.

Reference: ORACLE, appendix B.2: c_hat = (5 c0 + sum of peaks of finished programs) / (5 + n), D likewise.
"""

from typing import TypeVar

import msgspec

_T = TypeVar("_T", int, float)

PSEUDO_OBSERVATIONS = 5
RECENT_MAX = 256
PRIOR_SPREAD = (0.4, 0.7, 1.0, 1.3, 1.6)
"""Where the five pseudo-observations lie, in units of their mean: nobody expects all programs to be alike."""
COMMON_MAX = 16
FIRST_SHARE = 0.1
"""With which the latest first context enters the mean."""


class Demand(msgspec.Struct, kw_only=True):
    """Peak tokens and run times of one model's programs.

    >>> demand = Demand(prior_tokens=1000)
    >>> demand.learn(4000)
    >>> demand.expected_tokens
    1500
    """

    prior_tokens: int
    n_finished: int = 0
    sum_peak_tokens: int = 0
    prior_run_s: float = 300.0
    n_runs: int = 0
    sum_run_s: float = 0.0
    recent_peaks: list[int] = []
    recent_runs_s: list[float] = []
    n_overdue: int = 0
    """Programs that ran out of their time budget while they ran."""
    cut_tokens: list[int] = []
    """Contexts of the same, of late: their peaks would have been larger."""
    cut_s: list[float] = []
    """How long they had run."""
    first_tokens: float = 0.0
    """With how many tokens those begin who have had to wait, on average."""
    n_left: int = 0
    """Programs that have waited in the line and left it for another model, or for good."""
    waited_s: float = 0.0
    """What all have waited in the line, however that ended."""
    first_cached: list[int] = []
    """Tokens of first prompts that were found in the cache of late: what all programs have in common is in all."""

    @property
    def expected_tokens(self) -> int:
        """The estimate c_hat, in tokens."""
        total = PSEUDO_OBSERVATIONS * self.prior_tokens + self.sum_peak_tokens
        return round(total / (PSEUDO_OBSERVATIONS + self.n_finished))

    @property
    def expected_run_s(self) -> float:
        """The estimate D of a program's run time, from its admission to its end, in seconds."""
        total_s = PSEUDO_OBSERVATIONS * self.prior_run_s + self.sum_run_s
        return total_s / (PSEUDO_OBSERVATIONS + self.n_runs)

    @property
    def peaks(self) -> list[float]:
        """What peaks are expected from: those seen of late, and the prior's."""
        return [*(spread * self.prior_tokens for spread in PRIOR_SPREAD), *self.recent_peaks]

    @property
    def finished_ratio(self) -> float:
        """Share of programs that end within their budget once they have started, five of them assumed.

        >>> Demand(prior_tokens=1, n_finished=3, n_overdue=2).finished_ratio
        0.8
        """
        n_finished = PSEUDO_OBSERVATIONS + self.n_finished
        return n_finished / (n_finished + self.n_overdue)

    @property
    def proven_ratio(self) -> float:
        """The same as far as it has been seen: one that has ended assumed and one that has not, so half to begin with.

        Those that run out of time are known last, when all others of a crowd have long been let in.

        >>> Demand(prior_tokens=1).proven_ratio, Demand(prior_tokens=1, n_finished=3, n_overdue=1).proven_ratio
        (0.5, 0.6666666666666666)
        """
        return (1 + self.n_finished) / (2 + self.n_finished + self.n_overdue)

    @property
    def common_tokens(self) -> int:
        """Leading tokens that programs share, as far as caches have shown; 0 until enough have been seen."""
        return min(self.first_cached) if len(self.first_cached) >= COMMON_MAX // 2 else 0

    def learn(self, peak_tokens: int) -> None:
        """Count a finished program's largest context."""
        self.n_finished += 1
        self.sum_peak_tokens += peak_tokens
        remember(self.recent_peaks, peak_tokens)

    def learn_run(self, run_s: float) -> None:
        """Count a finished program's run time."""
        self.n_runs += 1
        self.sum_run_s += run_s
        remember(self.recent_runs_s, run_s)

    def learn_overdue(self, tokens: int = 0, run_s: float = 0.0) -> None:
        """A program ran out of time when its context was so large and it had run so long."""
        self.n_overdue += 1
        if run_s > 0.0:
            remember(self.cut_tokens, tokens)
            remember(self.cut_s, run_s)

    def learn_held(self, needed_tokens: int) -> None:
        """A program that needs so many tokens to begin with has joined the line."""
        share = FIRST_SHARE if self.first_tokens else 1.0
        self.first_tokens += share * (needed_tokens - self.first_tokens)

    def learn_wait(self, waited_s: float, *, is_served: bool) -> None:
        """A program is no longer in the line: it starts here, or not."""
        self.waited_s += waited_s
        self.n_left += not is_served and waited_s > 0.0

    def learn_first(self, cached_tokens: int) -> None:
        """A program's first call was answered: so much of its prompt was there already."""
        remember(self.first_cached, cached_tokens, COMMON_MAX)


def remember(values: list[_T], value: _T, limit: int = RECENT_MAX) -> None:
    """Keep a value, and of all no more than the latest `limit`."""
    values.append(value)
    if len(values) > limit:
        del values[0]
