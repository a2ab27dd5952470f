"""LinUCB in a world that changes: evidence fades, and a candidate that is no longer what it was is learned anew."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadwise.kernel.errors import ConfigError, LawBroken, SchemaMismatch, Unprocessable
from loadwise.kernel.streams import Generator

from .base import Candidate, Choice, Context, Feedback, Vector
from .context import N_FEATURES_MAX
from .gram import Array
from .linear import LinUCBOptions
from .picking import best_or_any
from .ridge import CANDIDATES_MAX, NORM_MAX, REWARD_MAX
from .state import dump_state, load_state
from .stateless import reported

PENDING_MAX = 100_000
"""Decisions remembered until their verdict (law L15); beyond it the oldest no longer narrow a width."""
FORGOTTEN = -1
"""The epoch of a decision whose candidate was forgotten after its verdict."""


class DriftOptions(LinUCBOptions, frozen=True, kw_only=True):
    """Configuration of `Drift`; of a linear policy's options it takes alpha, ridge and the floor."""

    exploration_floor: float = 0.02
    discount: float = 0.998
    """γ: what evidence keeps of its weight at each later verdict of anybody; 1 keeps all."""
    alarm: float = 6.0
    """h: sum of surprises at which a candidate counts as changed; 0 never."""
    tolerance: float = 0.12
    """δ: surprise of one verdict that is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.9 <= self.discount <= 1.0:
            raise ConfigError(f"discount is {self.discount!r}; it must be in [0.9, 1]")
        if not 0.0 <= self.alarm <= 1e6:
            raise ConfigError(f"alarm is {self.alarm!r}; it must be in [0, 1e6]")
        if not 0.0 <= self.tolerance <= 1e6:
            raise ConfigError(f"tolerance is {self.tolerance!r}; it must be in [0, 1e6]")
        if self.prior is not None or self.component_ridge is not None or self.gram != "gram_all":
            raise ConfigError("policy 'drift' has no prior, no component_ridge, and gram 'gram_all' alone")


class _Arm:
    """What is known of one candidate; sums are of the weights that evidence had when `at` verdicts had landed."""

    __slots__ = ("at", "born", "credits", "down", "epoch", "landed", "n_alarms", "pending", "up")

    def __init__(self, d: int, at: int) -> None:
        self.landed, self.credits = np.zeros((d, d)), np.zeros(d)
        self.pending: dict[int, tuple[Vector, int]] = {}
        """By decision its context, and how many verdicts had landed before it."""
        self.at = at
        self.up = self.down = 0.0
        self.epoch = 0
        self.born = 0
        """The first verdict, by how many had landed with it, that can be of this epoch."""
        self.n_alarms = 0


class Drift:
    """Discounted LinUCB with a change-point alarm for each candidate.

        V_k = λI + Σ γ^age x xᵀ,   L_k, b_k alike over judged decisions,   index as LinUCB
        up_k <- max(0, up_k + (r - xᵀθ_k) - δ),   down_k <- max(0, down_k - (r - xᵀθ_k) - δ);   above h: forget k

    Age counts verdicts of anybody, so a candidate that is not tried grows uncertain and is tried again: one that
    becomes the best is found within about 1/(1-γ) verdicts, one that changes grossly within a few of its own. A model
    that was swapped behind its name is the same thing; `forget` says it outright. Pending decisions are kept one by one
    and added up when asked, so that one that is undone leaves no rounding behind.

    A verdict that is taken back leaves L and b with the weight it has now, and the corrected one enters with that
    weight, as if it had been right at once. What is not taken back: that evidence faded by it, and an alarm that it
    rang or added to. Evidence dropped by an alarm stays dropped, and a correction of a verdict from before it changes
    nothing.

    Reads:
        price_usd, for ties.

    References:
        Y. Russac, C. Vernade, O. Cappé, Weighted Linear Bandits for Non-Stationary Environments, NeurIPS 2019 (without
        its second matrix). E. Page, Continuous Inspection Schemes, Biometrika 41, 1954.

    >>> policy, x = Drift(DriftOptions(exploration_floor=0.0, n_features=1)), np.ones(1)
    >>> policy.observe(1, "a", x)
    >>> policy.learn(Feedback(decision_id=1, candidate="a", x=x, reward=1.0))
    >>> policy.choose(Context(decision_id=2, x=x), [Candidate(name="a")], np.random.default_rng(0)).means
    (0.5,)
    """

    name = "drift"
    reads: tuple[str, ...] = ("price_usd",)

    def __init__(self, options: DriftOptions = DriftOptions()) -> None:  # noqa: B008 - frozen
        self._options = options
        self._d = options.n_features or 0
        self._arms: dict[str, _Arm] = {}
        self._n_landed = 0
        self._pending: dict[int, tuple[str, int]] = {}
        """By decision: candidate, and its epoch then."""
        self._taken_back: dict[int, int] = {}
        """By decision whose verdict was taken back: how many verdicts had landed with that."""
        self.is_deterministic = options.exploration_floor == 0.0

    @property
    def n_alarms(self) -> int:
        """How often any candidate has counted as changed."""
        return sum(arm.n_alarms for arm in self._arms.values())

    @property
    def alarms(self) -> Mapping[str, int]:
        """How often each candidate has counted as changed."""
        return {name: arm.n_alarms for name, arm in self._arms.items()}

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """The highest index, or by the floor any."""
        x = self._checked(context.x)
        means, widths = [], []
        for candidate in candidates:
            mean, spread = self._estimate(candidate.name, x)
            means.append(mean)
            widths.append(self._options.alpha * spread)
        scores = [mean + width for mean, width in zip(means, widths, strict=True)]
        return best_or_any(scores, means, candidates, self._options.exploration_floor, rng, widths)

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """Those that the choice reports: they are exact."""
        return reported(choice)

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision enters V."""
        vector = self._checked(x)
        arm = self._arm(candidate, len(vector))
        arm.pending[decision_id] = (vector.copy(), self._n_landed)
        self._pending[decision_id] = (candidate, arm.epoch)
        if len(self._pending) > PENDING_MAX:
            oldest = next(iter(self._pending))
            self._arms[self._pending.pop(oldest)[0]].pending.pop(oldest, None)
            self._taken_back.pop(oldest, None)

    def learn(self, feedback: Feedback) -> None:
        """The verdict enters L and b; where the candidate has changed, what was known of it is forgotten first."""
        if not abs(feedback.reward) <= REWARD_MAX:
            raise Unprocessable(f"a reward of {feedback.reward!r}; it must be within ±{REWARD_MAX:g}", param="reward")
        vector = self._checked(feedback.x)
        decision_id = feedback.decision_id
        pending = self._pending.pop(decision_id, None)
        landed_at = self._taken_back.pop(decision_id, None)
        if landed_at is None:
            self._n_landed += 1
        arm = self._arm(feedback.candidate, len(vector))
        epoch = arm.epoch if pending is None else pending[1]
        arm.pending.pop(decision_id, None)
        if epoch == arm.epoch and landed_at is None:
            surprise = feedback.reward - self._estimate(feedback.candidate, vector)[0]
            if self._is_changed(arm, surprise):
                self.forget(feedback.candidate)
                arm.n_alarms += 1
                epoch, arm.born = arm.epoch, self._n_landed
        at = self._n_landed if landed_at is None else landed_at
        if epoch == arm.epoch:  # else it ran before the change
            self._add(arm, vector, feedback.reward, self._options.discount ** (self._n_landed - at))

    def _add(self, arm: _Arm, x: Vector, reward: float, weight: float) -> None:
        arm.landed += weight * np.multiply.outer(x, x)
        arm.credits += weight * reward * x

    def unlearn(self, feedback: Feedback) -> None:
        """The verdict leaves L and b, and its decision is pending again; see the class's word on what stays.

        Raises:
            LawBroken: the decision is pending, so nothing was learned of it.
        """
        vector, decision_id = self._checked(feedback.x), feedback.decision_id
        if decision_id in self._pending:
            raise LawBroken("L11", f"decision {decision_id} was never learned from, and cannot be unlearned")
        arm = self._arm(feedback.candidate, len(vector))
        at = max(self._n_landed - feedback.age, 0)
        is_known = at >= arm.born
        self._pending[decision_id] = (feedback.candidate, arm.epoch if is_known else FORGOTTEN)
        self._taken_back[decision_id] = at
        if is_known:
            self._add(arm, vector, feedback.reward, -(self._options.discount**feedback.age))
            arm.pending[decision_id] = (vector.copy(), at)

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """The decision leaves V."""
        self._checked(x)
        if self._pending.get(decision_id, (None,))[0] != candidate:
            raise LawBroken("L11", f"undo of decision {decision_id} for candidate {candidate!r}, which is not pending")
        del self._pending[decision_id]
        self._taken_back.pop(decision_id, None)
        self._arms[candidate].pending.pop(decision_id, None)

    def forget(self, candidate: str) -> None:
        """A model behind a name was swapped: it is new from now on, decisions under way included."""
        arm = self._arms.get(candidate)
        if arm is None:
            return
        arm.landed[...] = 0.0
        arm.credits[...] = 0.0
        arm.pending.clear()
        arm.up = arm.down = 0.0
        arm.epoch += 1
        arm.born = self._n_landed + 1

    def _is_changed(self, arm: _Arm, surprise: float) -> bool:
        options = self._options
        arm.up = max(0.0, arm.up + surprise - options.tolerance)
        arm.down = max(0.0, arm.down - surprise - options.tolerance)
        # What was learned of few verdicts surprises because it is little, not because the candidate changed.
        return options.alarm > 0.0 and max(arm.up, arm.down) > options.alarm

    def _estimate(self, name: str, x: Vector) -> tuple[float, float]:
        """xᵀθ and the spread sqrt(xᵀV⁻¹x)."""
        arm, ridge = self._arms.get(name), self._options.ridge
        if arm is None:
            return 0.0, math.sqrt(float(x.dot(x)) / ridge)
        fade = self._options.discount ** (self._n_landed - arm.at)
        judged = ridge * np.eye(len(x)) + fade * arm.landed
        by_tried = by_landed = np.linalg.solve(judged, x)
        if arm.pending:
            rows = np.stack([vector for vector, _ in arm.pending.values()])
            ages = self._n_landed - np.array([landed for _, landed in arm.pending.values()])
            by_tried = np.linalg.solve(judged + (rows.T * self._options.discount**ages) @ rows, x)
        return float(fade * arm.credits.dot(by_landed)), math.sqrt(max(float(x.dot(by_tried)), 0.0))

    def _arm(self, name: str, d: int) -> _Arm:
        """The candidate, its sums brought to the weights of now."""
        if self._d == 0:
            self._d = d
        arm = self._arms.get(name)
        if arm is None:
            if len(self._arms) >= CANDIDATES_MAX:
                raise Unprocessable(f"candidate {name!r} is one more than the limit of {CANDIDATES_MAX}")
            arm = self._arms[name] = _Arm(d, self._n_landed)
        fade = self._options.discount ** (self._n_landed - arm.at)
        if fade != 1.0:
            arm.landed *= fade
            arm.credits *= fade
        arm.at = self._n_landed
        return arm

    def _checked(self, x: Any) -> Vector:
        vector: Vector = np.asarray(x, dtype=np.float64)
        d = self._d or min(max(vector.size, 1), N_FEATURES_MAX)
        if vector.shape != (d,):
            raise Unprocessable(f"a context of shape {vector.shape}; this policy takes ({d},)", param="x")
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(vector.dot(vector))
        if not square <= NORM_MAX * NORM_MAX:
            raise Unprocessable(f"a context of squared length {square!r}; it must be <= {NORM_MAX**2:g}", param="x")
        return vector

    def dump(self) -> bytes:
        """Sums, alarms, and pending decisions."""
        names = tuple(self._arms)
        arms = list(self._arms.values())
        d, k = self._d, len(arms)
        # A decision from before a swap has no context any more: its row is zero.
        blank = (np.zeros(d), 0)
        found = [
            (i, name, epoch, *self._arms[name].pending.get(i, blank)) for i, (name, epoch) in self._pending.items()
        ]
        pending = [(i, names.index(name), epoch + 1, landed) for i, name, epoch, _, landed in found]
        return dump_state(
            self.name,
            self._configuration(),
            names=names,
            counts={
                "n_features": (d,),
                "n_landed": (self._n_landed,),
                "n_alarms": tuple(arm.n_alarms for arm in arms),
                "at": tuple(arm.at for arm in arms),
                "epoch": tuple(arm.epoch for arm in arms),
                "n_pending": (len(pending),),
                "pending": tuple(value for entry in pending for value in entry),
                "born": tuple(arm.born for arm in arms),
                "n_taken_back": (len(self._taken_back),),
                "taken_back": tuple(value for entry in self._taken_back.items() for value in entry),
            },
            arrays={
                "waiting": _stacked([row for _, _, _, row, _ in found], (len(found), d)),
                "landed": _stacked([arm.landed for arm in arms], (k, d, d)),
                "credits": _stacked([arm.credits for arm in arms], (k, d)),
                "sums": _stacked([np.array([arm.up, arm.down]) for arm in arms], (k, 2)),
            },
        )

    def load(self, state: bytes) -> None:
        """Continue from a dump.

        Raises:
            SchemaMismatch: it is of another policy, configuration or number of features.
        """
        stored = load_state(state, self.name, self._configuration())
        d, k = stored.count("n_features", 1)[0], len(stored.names)
        if self._options.n_features not in (None, d):
            raise SchemaMismatch(f"dump of policy 'drift' has {d} features; here {self._options.n_features}")
        at, epoch = stored.count("at", k), stored.count("epoch", k)
        landed = stored.array("landed", (k, d, d))
        credits, sums = stored.array("credits", (k, d)), stored.array("sums", (k, 2))
        n_pending = stored.count("n_pending", 1)[0]
        flat = stored.count("pending", 4 * n_pending)
        waiting = stored.array("waiting", (n_pending, d))
        n_landed, n_alarms = stored.count("n_landed", 1)[0], stored.count("n_alarms", k)
        born = stored.count("born", k)
        taken_back = stored.count("taken_back", 2 * stored.count("n_taken_back", 1)[0])
        if any(place >= k for place in flat[1::4]):
            raise SchemaMismatch("dump of policy 'drift' has a pending decision of no candidate")
        self._d, self._n_landed = d, n_landed
        self._taken_back = dict(zip(taken_back[::2], taken_back[1::2], strict=True))
        self._arms = {}
        for place, name in enumerate(stored.names):
            arm = self._arms[name] = _Arm(d, at[place])
            arm.landed, arm.credits = landed[place], credits[place]
            arm.up, arm.down = sums[place].tolist()
            arm.epoch, arm.born, arm.n_alarms = epoch[place], born[place], n_alarms[place]
        entries = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
        self._pending = {}
        for row, (i, place, epoch_after, before) in zip(waiting, entries, strict=True):
            name, of_epoch = stored.names[place], epoch_after - 1
            self._pending[i] = (name, of_epoch)
            if of_epoch == self._arms[name].epoch:
                self._arms[name].pending[i] = (row.copy(), before)

    def _configuration(self) -> dict[str, Any]:
        skipped = ("n_features", "n_components", "prior", "prior_strength", "component_ridge")
        options = self._options
        return {field: getattr(options, field) for field in options.__struct_fields__ if field not in skipped}


def _stacked(parts: list[Array], shape: tuple[int, ...]) -> Array:
    return np.array(parts, dtype=np.float64).reshape(shape)
