"""How many tokens a program will need at its peak: a mean that starts from a prior worth five observations.

Reference: ORACLE, appendix B.2: c_hat = (5 c0 + sum of peaks of finished programs) / (5 + n).
"""

import msgspec

PSEUDO_OBSERVATIONS = 5


class Demand(msgspec.Struct, kw_only=True):
    """Peak tokens of one model's programs.

    >>> demand = Demand(prior_tokens=1000)
    >>> demand.learn(4000)
    >>> demand.expected_tokens
    1500
    """

    prior_tokens: int
    n_finished: int = 0
    sum_peak_tokens: int = 0

    @property
    def expected_tokens(self) -> int:
        """The estimate c_hat, in tokens."""
        total = PSEUDO_OBSERVATIONS * self.prior_tokens + self.sum_peak_tokens
        return round(total / (PSEUDO_OBSERVATIONS + self.n_finished))

    def learn(self, peak_tokens: int) -> None:
        """Count a finished program's largest context."""
        self.n_finished += 1
        self.sum_peak_tokens += peak_tokens
