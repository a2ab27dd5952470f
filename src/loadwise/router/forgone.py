"""How much success diverts have cost of late, so that a bound can be put on it.

A wait is worth some success, and where lines do not end every program is worth moving: then throughput is bought with
whatever success there is. A rule that prices one move cannot see that; a bound on what all moves together give up can.

Both sums are of the latest `MEMORY` programs, so that a calm day is no licence for the rush after it. Nor are those who
go without having started: a client that comes again and again for a place would pay for as many diverts.
"""

import msgspec

MEMORY = 128.0
"""Programs over which sums are taken."""
KEPT = 1.0 - 1.0 / MEMORY
"""Of the sums, when another program comes."""


class Forgone(msgspec.Struct, kw_only=True):
    """Success that programs were expected to have where the selector sent them, and what of it diverts gave up.

    >>> forgone = Forgone()
    >>> for _ in range(10):
    ...     forgone.learn_routed(0.6)
    >>> forgone.learn_diverted(0.3)
    >>> round(forgone.ratio, 3), forgone.allows(0.2, max_ratio=0.1), forgone.allows(0.3, max_ratio=0.1)
    (0.052, True, False)
    """

    expected: float = 0.0
    given_up: float = 0.0
    n_routed: int = 0
    """Programs so far."""

    def learn_routed(self, success: float) -> None:
        """A program is to run where it is expected to succeed so often."""
        self.expected = KEPT * self.expected + max(success, 0.0)
        self.given_up *= KEPT
        self.n_routed += 1

    def learn_diverted(self, gap: float, gap_before: float = 0.0) -> None:
        """A program runs elsewhere and succeeds so much less often; a move that gains buys no others.

        Args:
            gap_before: what it had given up already, if it was diverted before.
        """
        self.given_up = max(self.given_up + (max(gap, 0.0) - max(gap_before, 0.0)), 0.0)

    def take_back(self, success: float, gap: float, number: int) -> None:
        """A program will never start: nothing was to be expected of it, and nothing is given up.

        Args:
            number: what `n_routed` was with it; with each program since, less of it is left in the sums.
        """
        share = KEPT ** max(self.n_routed - number, 0)
        self.expected = max(self.expected - share * max(success, 0.0), 0.0)
        self.given_up = max(self.given_up - share * max(gap, 0.0), 0.0)

    def allows(self, gap: float, max_ratio: float) -> bool:
        """Whether another divert at this price keeps what is given up within a share of what was expected."""
        return gap <= 0.0 or self.given_up + gap <= max_ratio * self.expected

    @property
    def ratio(self) -> float:
        """Share given up."""
        return self.given_up / self.expected if self.expected > 0.0 else 0.0
