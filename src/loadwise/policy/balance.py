"""Baselines that look at load only: the least loaded of all, or of two drawn by chance."""

from collections.abc import Sequence

from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context
from .picking import by_name, certain
from .stateless import Stateless

_READS = ("n_running", "n_held", "n_others", "headroom_ratio", "price_usd")


def load_key(candidate: Candidate) -> tuple[float, float, float, str]:
    """Sorts the less loaded first: turns on it, ours and others', then headroom, then price, then name.

    >>> idle, busy = Candidate(name="idle", price_usd=9.0), Candidate(name="busy", n_running=1, n_held=2)
    >>> min([busy, idle], key=load_key).name
    'idle'
    """
    return (
        candidate.n_running + candidate.n_held + candidate.n_others,
        -candidate.headroom_ratio,
        candidate.price_usd,
        candidate.name,
    )


class LeastLoaded(Stateless):
    """The candidate with the fewest turns: a = argmin_k (n_running_k + n_held_k + n_others_k).

    Equal loads go to more headroom, then to the cheaper candidate, then to the first name.

    Reads:
        n_running, n_held, n_others, headroom_ratio, price_usd.

    Assumes:
        Loads are current. Choosers that share a stale view herd onto one candidate; `PowerOfTwo` does not.

    >>> import numpy as np
    >>> pool = [Candidate(name="a", n_running=2), Candidate(name="b", n_running=1), Candidate(name="c", n_held=1)]
    >>> LeastLoaded().choose(Context(decision_id=1, x=np.ones(1)), pool, np.random.default_rng(0)).chosen
    1
    """

    name = "least_loaded"
    reads: tuple[str, ...] = _READS
    is_deterministic = True

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The least loaded."""
        chosen = min(by_name(candidates), key=lambda index: load_key(candidates[index]))
        return Choice(chosen=chosen, propensities=certain(chosen, len(candidates)))


class Resident(Stateless):
    """The replica with the most room left once the prompt is there, what is cached already not counted.

        a = argmax_k (min(headroom_k, 1 - kv_usage_k) - 2 fresh_k)

    with the KV usage counted where other clients are on it, and fresh_k what of the prompt must be read anew, both as
    shares of k's capacity. It counts twice: once for the room that it takes, and once for the work of reading it, a
    token to be read being worth a token that is free. Equal ones go by load (`load_key`).

    Reads:
        headroom_ratio, fresh_ratio, kv_usage_ratio, n_running, n_held, n_others, price_usd.

    Assumes:
        Headroom counts whole programs, not turns: a program between two calls still has its place.

    >>> import numpy as np
    >>> pool = [Candidate(name="cold", fresh_ratio=0.2), Candidate(name="warm", headroom_ratio=0.9)]
    >>> Resident().choose(Context(decision_id=1, x=np.ones(1)), pool, np.random.default_rng(0)).chosen
    1
    """

    name = "resident"
    reads: tuple[str, ...] = (*_READS, "fresh_ratio", "kv_usage_ratio")
    is_deterministic = True

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The one with the most room left."""
        chosen = min(by_name(candidates), key=lambda index: _room_key(candidates[index]))
        return Choice(chosen=chosen, propensities=certain(chosen, len(candidates)))


def _room_key(candidate: Candidate) -> tuple[float, tuple[float, float, float, str]]:
    room = candidate.headroom_ratio
    if candidate.n_others > 0.0 and candidate.kv_usage_ratio is not None:
        room = min(room, 1.0 - candidate.kv_usage_ratio)
    return 2.0 * candidate.fresh_ratio - room, load_key(candidate)


class PowerOfTwo(Stateless):
    """The less loaded of two different candidates drawn by chance.

    With K candidates ranked by load (rank 0 the least loaded) a candidate wins when it is drawn together with one of
    higher rank: P(a = rank i) = (K - 1 - i) / (K(K-1)/2). The most loaded is never chosen (K >= 2).

    Reads:
        n_running, n_held, n_others, headroom_ratio, price_usd.

    Assumes:
        Loads may be stale: chance keeps choosers with the same view apart.

    References:
        M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001.

    >>> import numpy as np
    >>> pool = [Candidate(name="a", n_running=2), Candidate(name="b", n_running=1), Candidate(name="c")]
    >>> choice = PowerOfTwo().choose(Context(decision_id=1, x=np.ones(1)), pool, np.random.default_rng(0))
    >>> [round(propensity, 3) for propensity in choice.propensities]
    [0.0, 0.333, 0.667]
    """

    name = "power_of_two"
    reads: tuple[str, ...] = _READS
    is_deterministic = False

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The less loaded of two."""
        order = by_name(candidates)
        n = len(order)
        if n == 1:
            return Choice(chosen=0, propensities=(1.0,))
        ranked = sorted(order, key=lambda index: load_key(candidates[index]))
        first = int(rng.random() * n)
        second = int(rng.random() * (n - 1))
        second += second >= first
        chosen = ranked[min(first, second)]
        propensities = [0.0] * n
        for rank, index in enumerate(ranked):
            propensities[index] = 2.0 * (n - 1 - rank) / (n * (n - 1))
        return Choice(chosen=chosen, propensities=tuple(propensities))
