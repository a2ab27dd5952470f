"""How full a cache may be before contexts of living programs are lost from it, learned from what answers say.

An engine keeps what was computed until it needs the room for something else. As long as all living contexts fit, every
turn finds its program's context there; beyond that, least recently used goes first, and within a tenth of the capacity
nearly every turn is read anew. Where that cliff lies no metric tells: blocks are rounded up, checkpoints of state stay
behind, other clients take their share, declared capacities are wrong. But each answer tells how much of its prompt was
found, and so whether the cliff was below what the cache was filled with.

While hardly a turn is lost, one that kept its context in a cache about as full as the bound raises it by `RAISE` of
what that context has grown by. Once more than `LOST_SHARE` of late turns were lost the cache *thrashes*: what is read
anew pushes out what is needed next, so that a cache which was over the cliff by one program stays bad until far less is
in it. Waiting for programs to end would take minutes. So it is *relieved*: nobody is let in, and programs are to be
paused until `RELIEF` of the bound is left; they come back when turns find their contexts again, which takes a round or
two. The bound falls to `CUT` of the fill at which the cliff was met, and by `CUT` again if a relief does not help, or
not for long; beyond what it fell to it rises ten times more slowly. Losses short of that share are no cliff: programs
that were away for long lose theirs in any cache, and reading a few anew is cheap.
"""

import msgspec

LOST_SHARE = 0.12
"""Of turns: beyond it the cache thrashes. Gaps between turns are spread, and so is what a cache with room loses."""
CALM_SHARE = LOST_SHARE / 2
"""Of turns: below it a cache no longer thrashes."""
KEPT_SHARE = 0.02
"""Of turns: while more are lost, the bound does not rise."""
CUT = 0.9
RELIEF = 0.7
"""Share of the bound that a thrashing cache is brought down to: engines with checkpoints of state leave one for every
piece of what they read anew, and so need about half as much again as long as they do."""
PATIENCE_ROUNDS = 4
"""A round is an answer to each program; so many must show whether a relief has helped."""
AGAIN_ROUNDS = 3 * PATIENCE_ROUNDS
"""Within so many the cliff is met again because the bound is still too high."""
PEAK_ROUNDS = 2
"""Over so many rounds the fullest moment is forgotten: what is lost now was pushed out then."""
RAISE = 0.1
"""A generation of programs appends about twice what the cache holds at one time: a fifth of the bound for each."""
RAISE_BEYOND = RAISE / 10.0
NEAR = 0.9
"""Share of the bound at which a kept context says something of it."""
MEMORY = 32
"""Turns over which losses are averaged."""
FILL_MIN = 0.4
"""What is lost from a cache that is emptier than this was not lost for want of room. What is kept counts all the same:
a bound that a bad hour has brought down here must find its way up again."""
BOUND_MAX = 1.5
COUNT_MAX = 1_000_000
LOST_BELOW = 0.5
"""A context is lost if less than this share of it was found: block rounding and one checkpoint are no loss."""


class Residency(msgspec.Struct, kw_only=True):
    """The bound of one cache, as a share of the capacity that it is believed to have.

    >>> residency = Residency(bound_ratio=0.9)
    >>> residency.read(fill_ratio=0.8, found_ratio=1.0, grown_ratio=0.0, n_programs=20)
    >>> for _ in range(10):
    ...     residency.read(fill_ratio=0.8, found_ratio=0.0, grown_ratio=0.0, n_programs=20)
    >>> residency.is_thrashing, round(residency.bound_ratio, 2), round(residency.surplus_ratio(0.8), 2)
    (True, 0.72, 0.3)
    """

    bound_ratio: float
    lost_share: float = 0.0
    """Of late."""
    is_thrashing: bool = False
    n_since_cut: int = COUNT_MAX
    """Answers since the bound fell last."""
    peak_ratio: float = 0.0
    """How full it was at the fullest, of late."""
    start_ratio: float = 0.0
    """What the bound was before anything was learned."""
    cut_ratio: float = BOUND_MAX
    """What it fell to last, or to where it has risen since."""
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
        if not self.has_found or not (is_near or is_full or (self.is_thrashing and is_kept)):
            return
        faded_ratio = self.peak_ratio + (fill_ratio - self.peak_ratio) / (PEAK_ROUNDS * max(n_programs, 1) + 1)
        self.peak_ratio = max(fill_ratio, faded_ratio)
        self.lost_share += ((not is_kept) - self.lost_share) / MEMORY
        self.n_since_cut = min(self.n_since_cut + 1, COUNT_MAX)
        self.is_thrashing &= self.lost_share >= CALM_SHARE
        if not is_kept and is_full and self.lost_share > LOST_SHARE:
            self._fall(n_programs)
        elif is_kept and is_near and self.lost_share < KEPT_SHARE:
            self._rise(grown_ratio, min(max(self.bound_ratio, fill_ratio / near), most))

    def _fall(self, n_programs: int) -> None:
        """The cliff was met, or goes on."""
        if self.is_thrashing and self.n_since_cut <= PATIENCE_ROUNDS * n_programs:
            return
        is_again = self.n_since_cut <= AGAIN_ROUNDS * n_programs
        too_full = min(self.peak_ratio, self.bound_ratio) if is_again else self.peak_ratio
        self.bound_ratio = min(self.bound_ratio, max(CUT * too_full, CUT * FILL_MIN))
        self.cut_ratio, self.is_thrashing, self.n_since_cut = self.bound_ratio, True, 0

    def _rise(self, grown_ratio: float, most: float) -> None:
        is_beyond = self.bound_ratio >= self.cut_ratio
        raised = self.bound_ratio + (RAISE_BEYOND if is_beyond else RAISE) * grown_ratio
        self.bound_ratio = min(raised, most)
        if is_beyond:
            self.cut_ratio = self.bound_ratio

    def surplus_ratio(self, fill_ratio: float) -> float:
        """Share of the capacity that has to be paused: something only while the cache thrashes."""
        return max(fill_ratio - RELIEF * self.bound_ratio, 0.0) if self.is_thrashing else 0.0

    def lets_in(self, fill_ratio: float) -> bool:
        """Whether anybody new may come at all: not while the cache thrashes, but for one that is nearly empty."""
        return not self.is_thrashing or fill_ratio < FILL_MIN
