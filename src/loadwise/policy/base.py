"""What a policy is: it chooses without changing itself, and learns when told.

Theory of operation. The router asks `choose` once for a program, at its first turn. It then says `observe` (the
decision was made and its verdict is pending) and later exactly one of `learn` (a verdict landed) or `undo` (the
decision will never be judged). Because `choose` never mutates, what-if may ask any policy anything without spoiling it.
The router keeps the pending decisions; a policy keeps only what it learned.

A candidate is a model when the router chooses models, and a backend when it chooses a replica of a model; the same
policies serve both.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Generator

Vector = npt.NDArray[np.float64]


class Candidate(Fact, frozen=True, kw_only=True):
    """One permitted option."""

    name: str
    """Model id, or backend id when a replica is chosen."""
    price_usd: float = 0.0
    """US dollars per million tokens, blended; ties go to the cheaper candidate, then to the first name."""
    n_running: int = 0
    """Turns of ours in flight on it."""
    n_held: int = 0
    """Turns of ours waiting for it."""
    headroom_ratio: float = 1.0
    """Unreserved share of its admission limit; <= 0 when full."""
    fresh_ratio: float = 0.0
    """Share of its admission limit that the prompt at hand would fill beyond what is cached there already."""
    n_others: float = 0.0
    """Calls of other clients on it, as far as its metrics tell."""
    kv_usage_ratio: float | None = None
    """Used share of its KV cache, by the latest reading and what we have sent since; None where unknown."""
    e2e_s: float | None = None
    """Mean seconds of its calls of late; None where unknown."""
    wait_s: float | None = None
    """Forecast seconds until a new program would start there; None where it is not forecast."""


class Context(Fact, frozen=True, kw_only=True):
    """What a policy sees of the program."""

    decision_id: int
    x: Any
    """Feature vector, float64, shape (d,)."""
    at_s: float = 0.0
    task_type: str | None = None
    domain: str | None = None


class Choice(Fact, frozen=True, kw_only=True):
    """A candidate chosen, and how.

    `propensities` sum to one over the candidates (law L12); a deterministic policy reports 1 for its choice. A policy
    whose propensities are costly (Thompson) reports None here and answers `propensities(choice, rng)` off the path.
    """

    chosen: int
    """Index into the candidates."""
    scores: tuple[float, ...] = ()
    """One per candidate on the reward's scale; empty where the policy has none."""
    means: tuple[float, ...] = ()
    widths: tuple[float, ...] = ()
    propensities: tuple[float, ...] | None = None
    is_fallback: bool = False
    """The policy failed; `guarded.fall_back` chose instead."""


class Feedback(Fact, frozen=True, kw_only=True):
    """A landed verdict for an earlier decision."""

    decision_id: int
    candidate: str
    """The candidate that really ran."""
    x: Any
    """The context of the decision, shape (d,)."""
    reward: float
    age: int = 0
    """When it is taken back: how many verdicts the policy has learned from since."""


class Unlearner(Protocol):
    """What a policy may offer besides its contract, so that a wrong verdict can be put right."""

    def unlearn(self, feedback: Feedback) -> None:
        """Take back what `learn` was told with the same feedback: the decision is pending again."""
        ...


class Forgetter(Protocol):
    """What a policy may offer besides its contract, for models that are swapped behind their names."""

    def forget(self, candidate: str) -> None:
        """Begin anew with a candidate; decisions that are pending may still be learned from or undone."""
        ...


class Policy(Protocol):
    """The whole contract; `policy.checks` is its test suite."""

    name: str
    reads: tuple[str, ...]
    """Fields of `Candidate` that it looks at."""
    is_deterministic: bool
    """True when equal state and equal context always give the same choice; what-if refuses such logs."""

    def choose(self, context: Context, candidates: Sequence[Candidate], rng: Generator) -> Choice:
        """Pick one of `candidates` (at least one). Never mutates the policy."""
        ...

    def propensities(self, choice: Choice, rng: Generator) -> tuple[float, ...]:
        """The probability of each candidate under the state the choice was made in; may be a Monte Carlo estimate."""
        ...

    def observe(self, decision_id: int, candidate: str, x: Vector) -> None:
        """A decision was made; its verdict is pending."""
        ...

    def learn(self, feedback: Feedback) -> None:
        """A verdict landed. The decision was observed before."""
        ...

    def undo(self, decision_id: int, candidate: str, x: Vector) -> None:
        """An observed decision will never be judged: forget it, exactly."""
        ...

    def dump(self) -> bytes:
        """Everything learned, such that `load` continues identically."""
        ...

    def load(self, state: bytes) -> None:
        """Replace what was learned by a dumped state of the same policy and configuration."""
        ...
