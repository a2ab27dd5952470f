"""What a contextual policy sees of a program: a vector of configured features.

    x = [1 | one-hot of the task type | one-hot of the domain | principal components of the embedding]

(ORACLE, section 5.1 and appendix B.3.) A block is zero where the program has no such thing: no task type, a task type
that the specification does not list, no embedding. The vector's meaning is fixed by the specification; its `version`
goes into the journal, and a learner of one version is never fed vectors of another.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from loadwise.kernel.errors import ConfigError, Unprocessable
from loadwise.kernel.fact import Fact

from .base import Vector

N_FEATURES_MAX = 512
"""Learners keep matrices of this width squared for each candidate."""

COMPONENT_MAX = 1e3
"""Largest magnitude of a principal component; unit-length embeddings stay below one."""


class ContextSpec(Fact, frozen=True, kw_only=True):
    """Which features make up a context.

    >>> spec = ContextSpec(task_types=("patch", "support"), domains=("retail",), n_components=2)
    >>> spec.features("support", "retail", (0.5, -0.25)).tolist()
    [1.0, 0.0, 1.0, 1.0, 0.5, -0.25]
    >>> spec.features(None, "unheard of", ()).tolist()
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Raises:
        ConfigError: a name is empty or listed twice, or the number of features is out of range.
    """

    bias: bool = True
    """A leading feature that is always one."""
    task_types: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    n_components: int = 16
    """Principal components of the embedding; 0 leaves it out."""
    embedder: str = ""
    """Version of what makes the components, filled in by the host: another embedder means another vector."""

    def __post_init__(self) -> None:
        for field in ("task_types", "domains"):
            names = getattr(self, field)
            if isinstance(names, str):
                raise ConfigError(f"context {field} is {names!r}; it must be a list of names")
            if len(set(names)) != len(names) or "" in names:
                raise ConfigError(f"context {field} are {names!r}; each must be non-empty and listed once")
        if not 0 <= self.n_components <= N_FEATURES_MAX:
            raise ConfigError(f"context n_components is {self.n_components!r}; it must be in [0, {N_FEATURES_MAX}]")
        if not 1 <= self.n_features <= N_FEATURES_MAX:
            raise ConfigError(f"a context of {self.n_features} features; it must have 1 to {N_FEATURES_MAX}")

    @property
    def n_features(self) -> int:
        """The length of the vector."""
        return int(self.bias) + len(self.task_types) + len(self.domains) + self.n_components

    @property
    def names(self) -> tuple[str, ...]:
        """One readable name per feature."""
        return (
            *(("bias",) if self.bias else ()),
            *(f"task_type={name}" for name in self.task_types),
            *(f"domain={name}" for name in self.domains),
            *(f"component_{index}" for index in range(self.n_components)),
        )

    @property
    def version(self) -> str:
        """Twelve hexadecimal digits that change whenever the vector's meaning does.

        >>> ContextSpec().version == ContextSpec(n_components=16).version != ContextSpec(n_components=15).version
        True
        """
        # Spelled out, not encoded as a fact: a default that changes one day must change the version.
        content: list[object] = ["context-1", self.bias, self.task_types, self.domains, self.n_components]
        if self.embedder:
            content.append(self.embedder)
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:12]

    def features(self, task_type: str | None, domain: str | None, components: Sequence[float]) -> Vector:
        """The context of one program, shape (n_features,), every value finite.

        An embedding with a component that is not a number, infinite, or beyond ±1000 is no embedding: the whole block
        is zero, because a vector with one coordinate missing points somewhere else.

        Args:
            components: at most n_components; missing trailing ones are zero.

        Raises:
            Unprocessable: more components than the specification has; the embedder is of another specification.
        """
        if len(components) > self.n_components:
            raise Unprocessable(
                f"a context with {len(components)} components; the limit is n_components={self.n_components}",
                param="components",
            )
        x = np.zeros(self.n_features)
        at = 0
        if self.bias:
            x[0] = 1.0
            at = 1
        for names, name in ((self.task_types, task_type), (self.domains, domain)):
            if name in names:
                x[at + names.index(name)] = 1.0
            at += len(names)
        if len(components):
            block = np.asarray(components, dtype=np.float64)
            if np.abs(block).max() <= COMPONENT_MAX:  # false for a NaN
                x[at : at + len(components)] = block
        return x
