"""The k nearest past outcomes: what happened on tasks whose contexts look alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError, SchemaMismatch, Unprocessable
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Feedback, Vector
from .context import N_FEATURES_MAX
from .picking import best_or_any, check_floor
from .ridge import CANDIDATES_MAX, REWARD_MAX
from .state import dump_state, load_state
from .stateless import reported


class NearestOptions(Fact, frozen=True, kw_only=True):
    """Configuration of `Nearest`.

    Raises:
        ConfigError: a value is out of its range.
    """

    n_neighbours: int = 10
    """Past outcomes of each candidate that count at most."""
    similarity_min: float = 0.5
    """Cosine below which a context is no neighbour."""
    alpha: float = 0.6
    """How many widths optimism adds to the mean of a candidate with few neighbours."""
    capacity: int = 2048
    """Outcomes remembered; the oldest leave first."""
    exploration_floor: float = 0.0
    """ε: the probability of a uniform choice, in [0, 1)."""
    n_features: int | None = None
    context_version: str = ""
    """The version of the contexts learned on; a dump of another version does not load."""

    def __post_init__(self) -> None:
        for name, limit in (("n_neighbours", 1000), ("capacity", 65_536)):
            if not 1 <= getattr(self, name) <= limit:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be in [1, {limit}]")
        if not -1.0 <= self.similarity_min <= 1.0:
            raise ConfigError(f"similarity_min is {self.similarity_min!r}; it must be in [-1, 1]")
        if not 0.0 <= self.alpha <= 1e6:
            raise ConfigError(f"alpha is {self.alpha!r}; it must be in [0, 1e6]")
        check_floor(self.exploration_floor)
        if self.n_features is not None and not 1 <= self.n_features <= N_FEATURES_MAX:
            raise ConfigError(f"n_features is {self.n_features!r}; it must be in [1, {N_FEATURES_MAX}]")


class Nearest:
    """The best mean over the nearest past outcomes of each candidate, with optimism where there are few.

        N_k = the `n_neighbours` most similar remembered outcomes of k with cosine >= `similarity_min`
        score_k = Σ_{i in N_k} r_i / (1 + |N_k|) + α / sqrt(1 + |N_k|)

    Of equally similar outcomes the latest counts. Pending decisions are invisible.

    Reads:
        price_usd, for ties.

    Assumes:
        Similar contexts have similar outcomes; a repeated task finds its own.

    References:
        T. Cover, P. Hart, Nearest Neighbor Pattern Classification, 1967; as memory of a router: arXiv:2606.22902.

    >>> import numpy as np
    >>> pool, x = [Candidate(name="a"), Candidate(name="b")], np.array([1.0, 2.0])
    >>> policy = Nearest()
    >>> policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=0.8))
    >>> choice = policy.choose(Context(decision_id=2, x=x), pool, np.random.default_rng(0))
    >>> [round(score, 4) for score in choice.scores]
    [0.8243, 0.6]
    """

    name = "knn"
    reads: tuple[str, ...] = ("price_usd",)

    def __init__(self, options: NearestOptions = NearestOptions()) -> None:  # noqa: B008 - frozen
        self._options = options
        self._floor = options.exploration_floor
        self.is_deterministic = self._floor == 0.0
        self._start(options.n_features or 0)

    def _start(self, n_features: int) -> None:
        self._n_features = n_features
        self._units = np.zeros((self._options.capacity, n_features))  # contexts of length one, or zero
        self._rewards = np.zeros(self._options.capacity)
        self._owners: npt.NDArray[np.int64] = np.full(self._options.capacity, -1, dtype=np.int64)
        self._row_by_name: dict[str, int] = {}
        self._n_learned = 0

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The highest score, or by ε any."""
        unit = self._unit(context.x)
        means, scores = [], []
        order = self._nearest(unit)
        owners, rewards = self._owners[order], self._rewards[order]
        for candidate in candidates:
            found = rewards[owners == self._row_by_name.get(candidate.name, -2)][: self._options.n_neighbours]
            mean = float(found.sum()) / (1.0 + len(found))
            means.append(mean)
            scores.append(mean + self._options.alpha / float(1.0 + len(found)) ** 0.5)
        return best_or_any(scores, means, candidates, self._floor, rng)

    def _nearest(self, unit: Vector) -> npt.NDArray[np.int64]:
        """Remembered outcomes that are near enough: the nearest first, the latest first among equals."""
        n = min(self._n_learned, self._options.capacity)
        if n == 0:
            return np.zeros(0, dtype=np.int64)
        # Rounded, so that contexts which are equal up to the last bits count as equally near.
        similarity = np.round(self._units[:n] @ unit, 9)
        near = np.flatnonzero(similarity >= self._options.similarity_min)
        age = (self._n_learned - 1 - near) % self._options.capacity
        order: npt.NDArray[np.int64] = near[np.lexsort((age, -similarity[near]))]
        return order

    def _unit(self, x: Any) -> Vector:
        vector: Vector = np.asarray(x, dtype=np.float64)
        n_features = self._n_features or min(max(vector.size, 1), N_FEATURES_MAX)
        if vector.shape != (n_features,) or not np.isfinite(vector).all():
            raise Unprocessable(f"a context of shape {vector.shape}; it must be ({n_features},) and finite", param="x")
        largest = float(np.abs(vector).max())
        if largest == 0.0:
            return vector
        scaled = vector / largest  # so that no square under- or overflows
        unit: Vector = scaled / float(np.linalg.norm(scaled))
        return unit

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """Those that the choice reports: they are exact."""
        return reported(choice)

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Nothing to remember: only verdicts count."""

    def learn(self, feedback: Feedback) -> None:
        """The outcome is remembered; the oldest one leaves where there is no room.

        Raises:
            Unprocessable: the context or reward is out of range, or there is no room for another candidate.
        """
        if not abs(feedback.reward) <= REWARD_MAX:
            raise Unprocessable(f"a reward of {feedback.reward!r}; it must be within ±{REWARD_MAX:g}", param="reward")
        unit = self._unit(feedback.x)
        if self._n_features == 0:
            self._start(unit.size)
        if feedback.candidate not in self._row_by_name and len(self._row_by_name) >= CANDIDATES_MAX:
            raise Unprocessable(f"candidate {feedback.candidate!r} is one more than the limit of {CANDIDATES_MAX}")
        row = self._row_by_name.setdefault(feedback.candidate, len(self._row_by_name))
        place = self._n_learned % self._options.capacity
        self._units[place], self._rewards[place], self._owners[place] = unit, feedback.reward, row
        self._n_learned += 1

    def unlearn(self, feedback: Feedback) -> None:
        """The latest such outcome is forgotten; its place stays empty until the memory comes round to it.

        One that has left the memory already needs no forgetting.
        """
        row = self._row_by_name.get(feedback.candidate, -2)
        same = (self._owners == row) & (self._rewards == feedback.reward)
        same &= (self._units == self._unit(feedback.x)).all(axis=1)
        found = np.flatnonzero(same)
        if found.size:
            age = (self._n_learned - 1 - found) % self._options.capacity
            self._owners[found[np.argmin(age)]] = -1

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """Nothing to forget."""

    def _configuration(self) -> Mapping[str, Any]:
        options = self._options
        return {field: getattr(options, field) for field in options.__struct_fields__ if field != "n_features"}

    def dump(self) -> bytes:
        """The whole memory, empty places included."""
        return dump_state(
            self.name,
            self._configuration(),
            names=tuple(self._row_by_name),
            counts={
                "n_features": (self._n_features,),
                "n_learned": (self._n_learned,),
                "owners": tuple((self._owners + 1).tolist()),
            },
            arrays={"units": self._units, "rewards": self._rewards},
        )

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another policy, configuration, context version or number of features.
        """
        stored = load_state(state, self.name, self._configuration())
        capacity = self._options.capacity
        n_features = stored.count("n_features", 1)[0]
        if self._options.n_features not in (None, n_features) or n_features > N_FEATURES_MAX:
            raise SchemaMismatch(f"dump of policy {self.name!r} has contexts of {n_features} features")
        units = stored.array("units", (capacity, n_features))
        rewards = stored.array("rewards", (capacity,))
        owners = np.array(stored.count("owners", capacity), dtype=np.int64) - 1
        if len(stored.names) > CANDIDATES_MAX or owners.max() >= len(stored.names):
            raise SchemaMismatch(f"dump of policy {self.name!r}: outcomes of candidates that it does not name")
        n_learned = stored.count("n_learned", 1)[0]
        self._n_features, self._units, self._rewards, self._owners = n_features, units, rewards, owners
        self._row_by_name = {name: row for row, name in enumerate(stored.names)}
        self._n_learned = n_learned
