"""What a learner hears of a run, and when: the verifier, and the order in which verdicts land.

**Verifier** (ORACLE, section 5.2, B.3, E.3). Its verdict is the run's success, or zero where it cannot read the run:

    adaptive    the selector takes the family's own verifier; with probability 1 - q another one, which credits zero
    single      one verifier for all, the one that runs patches: it credits zero to every other family
    best        the best fixed verifier of each family: always right

**Landing.** Decision t of an order is followed by its verdict, which the learner hears just before some later decision:

    sequential  before decision t + 1 + delay
    delayed     C programs are in flight; when the next one is to start, one of them, drawn by chance, has ended
    batch       C programs start, then all their verdicts are awaited
    slots       C learners, each deciding every C-th program by what it alone has seen

Everything here is drawn before the replay and is the same for all policies and cost weights: they meet equal luck.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams

from .stream import Stream

Verification = Literal["adaptive", "single", "best"]
Concurrency = Literal["sequential", "delayed", "batch", "slots"]

MISCLASSIFIED_BY_FAMILY = {"swe": 0.02, "tau2": 0.01, "terminal1": 0.064, "terminal2": 0.026}
"""1 - q as ORACLE measured it (B.3)."""
MISCLASSIFIED_ELSEWHERE = 0.03
PATCH_FAMILY = "swe"
"""The family that a verifier which runs patches can read, with those named after it (`swe_…`)."""

Ints = npt.NDArray[np.int64]


class FeedbackSpec(Fact, frozen=True, kw_only=True):
    """The verifier and the landing of verdicts.

    Raises:
        ConfigError: a value is out of its range, or two do not go together.
    """

    verification: Verification = "adaptive"
    misclassified: float | None = None
    """1 - q for every family; None takes `misclassified_by_family`, then ORACLE's figures."""
    misclassified_by_family: dict[str, float] = {}
    concurrency: Concurrency = "sequential"
    in_flight: int = 1
    """C; 1 with `sequential`."""
    delay: int = 0
    """Further decisions before a verdict lands; only with `sequential`."""
    loss: float = 0.0
    """Probability that a verdict never lands."""

    def __post_init__(self) -> None:
        if self.verification not in get_args(Verification):
            raise ConfigError(f"verification {self.verification!r} is unknown; known: adaptive, single, best")
        if self.concurrency not in get_args(Concurrency):
            raise ConfigError(f"concurrency {self.concurrency!r} is unknown; known: sequential, delayed, batch, slots")
        if self.misclassified is not None and not 0.0 <= self.misclassified <= 1.0:
            raise ConfigError(f"misclassified is {self.misclassified!r}; it must be in [0, 1]")
        for family, ratio in self.misclassified_by_family.items():
            if not 0.0 <= ratio <= 1.0:
                raise ConfigError(f"misclassified of {family!r} is {ratio!r}; it must be in [0, 1]")
        if not 0.0 <= self.loss <= 1.0:
            raise ConfigError(f"loss is {self.loss!r}; it must be in [0, 1]")
        if not 1 <= self.in_flight <= 4096:
            raise ConfigError(f"in-flight is {self.in_flight!r}; it must be in [1, 4096]")
        if not 0 <= self.delay <= 10_000_000:
            raise ConfigError(f"delay is {self.delay!r}; it must be in [0, 10000000]")
        if self.concurrency == "sequential" and self.in_flight != 1:
            raise ConfigError(f"in-flight is {self.in_flight!r}; concurrency 'sequential' has 1")
        if self.concurrency != "sequential" and self.delay:
            raise ConfigError(f"delay is {self.delay!r}; concurrency {self.concurrency!r} sets when verdicts land")

    @property
    def n_learners(self) -> int:
        """Learners that share nothing."""
        return self.in_flight if self.concurrency == "slots" else 1


class Episode(NamedTuple):
    """One order of a stream over all passes: T = passes * n decisions and what is drawn for each."""

    task: Ints
    """Shape (T,)."""
    trial_draw: npt.NDArray[np.float64]
    """Uniform in [0, 1), shape (T,): which of its trials a run repeats."""
    credited: npt.NDArray[np.float64]
    """1 where the verifier reads the run, else 0, shape (T,)."""
    learner: Ints
    """Shape (T,)."""
    landing: Ints
    """Decisions in the order in which their verdicts land (or turn out to be lost)."""
    landing_end: Ints
    """Shape (T,): `landing[:landing_end[t]]` is over before decision t."""
    lost: npt.NDArray[np.bool_]
    """Shape (T,)."""


def make_episode(stream: Stream, spec: FeedbackSpec, streams: Streams, order: int, n_passes: int) -> Episode:
    """Everything drawn for one order, by its number and the seed alone."""
    n = stream.n_tasks
    permutation = streams.at("order", order).permutation(n)
    task: Ints = np.tile(permutation, n_passes).astype(np.int64)
    total = len(task)
    credited = _credited(stream, spec, streams.at("selector", order).random(total), task)
    landing, landing_end = _landing(spec, total, streams.at("landing", order))
    return Episode(
        task=task,
        trial_draw=streams.at("trial", order).random(total),
        credited=credited,
        learner=np.arange(total, dtype=np.int64) % spec.n_learners,
        landing=landing,
        landing_end=landing_end,
        lost=streams.at("loss", order).random(total) < spec.loss,
    )


def reads_patches(family: str) -> bool:
    """Whether the patch verifier reads runs of this family.

    >>> reads_patches("swe"), reads_patches("swe_lite"), reads_patches("terminal2")
    (True, True, False)
    """
    return family == PATCH_FAMILY or family.startswith(f"{PATCH_FAMILY}_")


def _credited(
    stream: Stream, spec: FeedbackSpec, draws: npt.NDArray[np.float64], task: Ints
) -> npt.NDArray[np.float64]:
    unread = np.array([1.0 - readable(spec, name) for name in stream.families])
    return (draws >= unread[stream.family[task]]).astype(np.float64)


def readable(spec: FeedbackSpec, family: str) -> float:
    """The probability that the verifier reads a run of `family`.

    >>> readable(FeedbackSpec(verification="single"), "terminal2"), readable(FeedbackSpec(misclassified=0.25), "swe")
    (0.0, 0.75)
    """
    if spec.verification == "single":
        return float(reads_patches(family))
    return 1.0 if spec.verification == "best" else 1.0 - misclassified(spec, family)


def misclassified(spec: FeedbackSpec, family: str) -> float:
    """The probability that another family's verifier is taken for `family`."""
    if spec.misclassified is not None:
        return spec.misclassified
    if family in spec.misclassified_by_family:
        return spec.misclassified_by_family[family]
    return MISCLASSIFIED_BY_FAMILY.get(family, MISCLASSIFIED_ELSEWHERE)


def _landing(spec: FeedbackSpec, total: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    steps = np.arange(total, dtype=np.int64)
    if spec.concurrency == "sequential":
        return steps, np.maximum(steps - spec.delay, 0)
    if spec.concurrency == "batch":
        return steps, steps // spec.in_flight * spec.in_flight
    if spec.concurrency == "slots":
        return steps, np.maximum(steps - spec.in_flight + 1, 0)
    picks = rng.random(total)
    flying: list[int] = []
    landing: list[int] = []
    for step in range(total):
        if len(flying) == spec.in_flight:
            place = min(int(picks[step] * len(flying)), len(flying) - 1)
            flying[place], flying[-1] = flying[-1], flying[place]
            landing.append(flying.pop())
        flying.append(step)
    return np.array(landing, dtype=np.int64), np.maximum(steps - spec.in_flight + 1, 0)
