"""How one of several candidates is picked: by score with a stated tie rule, by chance, or by both.

Everything drawn here walks the candidates in the order of their names, so the *name* that is picked does not depend on
the order in which the router happened to list them.
"""

from collections.abc import Sequence

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice

TIE_RATIO = 1e-9
"""Scores closer than this (relative to the best, absolute below one) are equal: rounding never breaks a tie."""


def by_name(candidates: Sequence[Candidate]) -> list[int]:
    """Indices of `candidates` in the order of their names.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("a policy was given 0 candidates; the least is 1")
    return sorted(range(len(candidates)), key=lambda index: candidates[index].name)


def best_index(scores: Sequence[float], candidates: Sequence[Candidate], tie_ratio: float = TIE_RATIO) -> int:
    """The index of the highest score; ties go to the cheaper candidate, then to the first name.

    >>> cheap, dear = Candidate(name="big", price_usd=0.1), Candidate(name="amd", price_usd=3.0)
    >>> best_index([0.5, 0.5 + 1e-12], [cheap, dear])
    0

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("a policy was given 0 candidates; the least is 1")
    top = max(scores)
    floor = top - tie_ratio * max(1.0, abs(top))
    near = [index for index, score in enumerate(scores) if score >= floor]
    if len(near) == 1:
        return near[0]
    return min(near, key=lambda index: (candidates[index].price_usd, candidates[index].name))


def check_floor(exploration_floor: float) -> None:
    """Refuse a probability of uniform choices that is not in [0, 1).

    Raises:
        ConfigError: it is not.
    """
    if not 0.0 <= exploration_floor < 1.0:
        raise ConfigError(f"exploration_floor is {exploration_floor!r}; it must be in [0, 1)")


def best_or_any(
    scores: Sequence[float],
    means: Sequence[float],
    candidates: Sequence[Candidate],
    floor: float,
    rng: Generator,
    widths: Sequence[float] = (),
) -> Choice:
    """The choice of the highest score (`best_index`), or with probability `floor` of any candidate."""
    argmax = best_index(scores, candidates)
    return Choice(
        chosen=explored(argmax, candidates, floor, rng),
        scores=tuple(scores),
        means=tuple(means),
        widths=tuple(widths),
        propensities=explored_propensities(argmax, len(candidates), floor),
    )


def explored(argmax: int, candidates: Sequence[Candidate], floor: float, rng: Generator) -> int:
    """`argmax`, or with probability `floor` any candidate, each equally likely. Draws only where `floor` > 0."""
    if floor <= 0.0:
        return argmax
    draw = float(rng.random())
    if draw >= floor:
        return argmax
    # A draw below the floor is itself uniform below it: the second choice needs no second draw.
    place = min(int(draw / floor * len(candidates)), len(candidates) - 1)
    return by_name(candidates)[place]


def explored_propensities(argmax: int, n_candidates: int, floor: float) -> tuple[float, ...]:
    """The law of `explored`: (1 - floor) on the argmax plus floor / n on everyone.

    >>> explored_propensities(1, 2, 0.02)
    (0.01, 0.99)
    """
    share = floor / n_candidates
    propensities = [share] * n_candidates
    propensities[argmax] += 1.0 - floor
    return tuple(propensities)


def certain(chosen: int, n_candidates: int) -> tuple[float, ...]:
    """The propensities of a deterministic choice: one for the chosen, zero elsewhere (law L12)."""
    return tuple(1.0 if index == chosen else 0.0 for index in range(n_candidates))
