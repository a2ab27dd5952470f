"""How full a cache may be before contexts of living programs are lost from it, learned from what answers say.

An engine keeps what was computed until it needs the room for something else. As long as all living contexts fit, every
turn finds its program's context there; beyond that, least recently used goes first, and within a tenth of the capacity
nearly every turn is read anew. Where that cliff lies no metric tells: blocks are rounded up, checkpoints of state stay
behind, other clients take their share, declared capacities are wrong. But each answer tells how much of its prompt was
found, and so whether the cliff was below what the cache was filled with.

While more than `LOST_SHARE` of late turns were lost, each loss lowers the bound by `STEP`, though not below what was
too much; while hardly any were, a turn that kept its context in a cache about as full as the bound raises it by
`RAISE` of what that context has grown by. So it falls within some twenty answers, and rises on evidence alone and
slowly: contexts go on growing after their programs were let in, and who was let in cannot be sent away, so that a
bound which runs ahead of one generation of programs meets the cliff with all of them. Losses short of that share are
no cliff: programs that were away for long lose theirs in any cache, and reading a few anew is cheap.
"""

import msgspec

LOST_SHARE = 0.12
"""Of turns. Gaps between turns are spread, and so is what they lose: up to here, throughput still gains by one more."""
STEP = 0.02
RAISE = 0.05
"""A generation of programs appends about twice what the cache holds at one time: a tenth of the bound for each."""
NEAR = 0.9
"""Share of the bound at which a kept context says something of it."""
BELOW_LOSS = 0.95
"""The bound lies no lower than this share of a fill at which a context was lost."""
MEMORY = 32
"""Turns over which losses are averaged."""
FILL_MIN = 0.4
"""What is lost from a cache that is emptier than this was not lost for want of room. What is kept counts all the same:
a bound that a bad hour has brought down here must find its way up again."""
BOUND_MAX = 1.5
LOST_BELOW = 0.5
"""A context is lost if less than this share of it was found: block rounding and one checkpoint are no loss."""


class Residency(msgspec.Struct, kw_only=True):
    """The bound of one cache, as a share of the capacity that it is believed to have.

    >>> residency = Residency(bound_ratio=0.9)
    >>> residency.read(fill_ratio=0.8, found_ratio=1.0, grown_ratio=0.0, n_programs=20)
    >>> for _ in range(30):
    ...     residency.read(fill_ratio=0.8, found_ratio=0.0, grown_ratio=0.0, n_programs=20)
    >>> round(residency.bound_ratio, 2)
    0.76
    """

    bound_ratio: float
    lost_share: float = 0.0
    """Of late."""
    start_ratio: float = 0.0
    """What the bound was before anything was learned."""
    has_found: bool = False
    """Something was found once; an engine that never says so tells nothing by finding nothing."""

    def __post_init__(self) -> None:
        self.start_ratio = self.start_ratio or self.bound_ratio

    def read(self, *, fill_ratio: float, found_ratio: float, grown_ratio: float, n_programs: int) -> None:
        """Take one answer to a program that has had its place since the one before.

        Args:
            fill_ratio: living contexts over the capacity, the larger of when this answer came and the one before.
            found_ratio: share of the program's context that was found in the cache.
            grown_ratio: what its context has grown by since, over the capacity.
            n_programs: how many living contexts there are.
        """
        is_kept = found_ratio >= LOST_BELOW
        self.has_found |= is_kept
        near, most = NEAR, BOUND_MAX
        if self.bound_ratio < self.start_ratio and n_programs < NEAR / (1.0 - NEAR):
            # Few large programs leave a gap that no other one fits into: what it was before is worth trying again.
            near, most = n_programs / (n_programs + 1), self.start_ratio
        is_near, is_full = fill_ratio >= near * self.bound_ratio, fill_ratio >= FILL_MIN
        if not self.has_found or not (is_near or is_full):
            return
        self.lost_share += ((not is_kept) - self.lost_share) / MEMORY
        if not is_kept and is_full and self.lost_share > LOST_SHARE:
            self.bound_ratio = max(self.bound_ratio - STEP, min(self.bound_ratio, BELOW_LOSS * fill_ratio))
        elif is_kept and is_near and self.lost_share < LOST_SHARE / 2:
            most = min(max(self.bound_ratio, fill_ratio / near), most)
            self.bound_ratio = min(self.bound_ratio + RAISE * grown_ratio, most)
