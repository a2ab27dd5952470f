"""Embedders: what turns a program's first request into the components of its context.

`hash` costs microseconds and answers at once. `minilm` (module `minilm`, extra `embed`) costs milliseconds and answers
from its own thread. Both read the first 48 and the last 16 words or tokens: instructions stand at the begin of a long
request, the question often at its end, and what lies between would only cost time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from zlib import crc32

from loadwise.kernel.errors import ConfigError

HEAD_UNITS = 48
TAIL_UNITS = 16
"""Words or tokens that are read at the begin and at the end of a text."""
HEAD_CHARS = 4096
TAIL_CHARS = 2048
"""A longer text is cut to these first, so that its length costs nothing."""

KINDS = ("none", "hash", "minilm")

Components = tuple[float, ...]


class Embedder(Protocol):
    """Text to components. An empty tuple means that there is no embedding, which is not an error."""

    @property
    def version(self) -> str:
        """Changes whenever equal texts may get other components."""
        ...

    def components_now(self, text: str) -> Components | None:
        """The components where that is cheap; None where `submit` must be used."""
        ...

    def submit(self, text: str, callback: Callable[[Components], None]) -> None:
        """Compute elsewhere; `callback` is called exactly once, on any thread, and never raises into the caller."""
        ...

    def close(self) -> None:
        """Stop. Every submitted text gets its callback; later ones get an empty tuple at once."""
        ...


def make_embedder(kind: str, n_components: int, examples: Mapping[str, Sequence[str]] | None = None) -> Embedder | None:
    """The embedder of a gateway; None where there is nothing to embed into.

    Args:
        kind: `none`, `hash` or `minilm`.
        n_components: length of what it gives.
        examples: texts by task type, to which `minilm` fits its components.

    Raises:
        ConfigError: the kind is unknown, or a package it needs is not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"embedder {kind!r} is unknown; known: {', '.join(KINDS)}")
    if kind == "none" or n_components == 0:
        return None
    if kind == "hash":
        return HashEmbedder(n_components)
    from .minilm import MiniLMEmbedder

    return MiniLMEmbedder(n_components, examples or {})


def clip(text: str) -> str:
    """A text with the middle taken out where it is long."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]} {text[-TAIL_CHARS:]}"


class HashEmbedder:
    """Signed feature hashing of words and pairs of neighbours (Weinberger et al. 2009), of unit length.

        component_j = sum of sign(w) over the words and pairs w with index(w) = j, divided by the norm of them all

    Equal texts give equal bits on every machine: the sums are whole numbers.

    >>> embedder = HashEmbedder(4)
    >>> embedder.components_now("Sort the list")
    (0.8944271909999159, 0.0, 0.0, -0.4472135954999579)
    >>> embedder.components_now(" ")
    ()
    """

    def __init__(self, n_components: int) -> None:
        if n_components < 1:
            raise ConfigError(f"n_components is {n_components!r}; it must be >= 1")
        self._n_components = n_components

    @property
    def version(self) -> str:
        """Names the rule and its length."""
        return f"hash-1-{self._n_components}"

    def components_now(self, text: str) -> Components:
        """The components, in tens of microseconds whatever the length."""
        words = _words(text)
        n = self._n_components
        counts = [0] * (2 * n)
        # A checksum spreads short texts well, and costs a tenth of what numpy takes over so few of them.
        hashes = list(map(crc32, words))
        hashes += map(crc32, words[1:], hashes)
        n_bins = 2 * n
        for value in hashes:
            counts[value % n_bins] += 1
        sums = [plus - minus for plus, minus in zip(counts[:n], counts[n:], strict=True)]
        norm = math.sqrt(sum([value * value for value in sums]))
        return tuple([value / norm for value in sums]) if norm else ()

    def submit(self, text: str, callback: Callable[[Components], None]) -> None:
        """As `components_now`, at once."""
        callback(self.components_now(text))

    def close(self) -> None:
        """Nothing to stop."""


def _words(text: str) -> list[bytes]:
    words = clip(text).lower().encode("utf-8", "surrogatepass").split(None, HEAD_UNITS)
    if len(words) > HEAD_UNITS:
        words += words.pop().rsplit(None, TAIL_UNITS)[-TAIL_UNITS:]
    return words
