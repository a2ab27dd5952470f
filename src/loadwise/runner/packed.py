"""An embedder with an experience pack: three components more, which say what the pack reads in the text.

    [the embedder's components | 1 | logit of success | log cost]

Where the pack reads marks and words alone, this takes tens of microseconds beside any embedder. Where it reads an
embedding too, the same vector serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadwise.kernel.errors import ConfigError
from loadwise.policy.reading import Reader

from .embed import Components, Embedder, clip, make_embedder
from .minilm import WIDTH, MiniLMEmbedder, Model

N_TOLD = 3
"""Components that a pack adds: whether the text was read, its logit of success, its log cost."""
READS_NONE = "none"
READS_MINILM = "minilm-int8-1"
"""The vectors that a pack may read besides marks and words."""


def pack_vectors(kind: str) -> tuple[Callable[[Sequence[str]], NDArray[np.float64]] | None, str]:
    """What turns texts into the vectors of embedder `kind` for fitting a pack, and their version.

    Raises:
        ConfigError: the kind is unknown, or a package it needs is not installed.
    """
    if kind in ("none", "hash"):
        return None, READS_NONE
    if kind != "minilm":
        raise ConfigError(f"embedder {kind!r} is unknown; known: none, hash, minilm")
    model = Model()

    def vectors(texts: Sequence[str]) -> NDArray[np.float64]:
        # One by one: padding would change them.
        return np.concatenate([model.embed([clip(text)]) for text in texts]).astype(np.float64)

    return vectors, READS_MINILM


def packed_embedder(
    kind: str,
    n_components: int,
    examples: Mapping[str, Sequence[str]] | None,
    reader: Reader | None,
    reads: str,
    digest: str,
) -> Embedder:
    """The embedder `kind` with a pack.

    Args:
        reader: the pack's text model; None leaves its components zero.
        reads: the embedder whose vectors it reads, or `none`.
        digest: of the pack.

    Raises:
        ConfigError: the pack reads vectors of another embedder, or as `make_embedder`.
    """
    if reader is None or reads == READS_NONE:
        if reader is not None and reader.width:
            raise ConfigError(f"the pack's text model reads vectors of {reader.width} numbers of no embedder")
        return PackedEmbedder(make_embedder(kind, n_components, examples), n_components, reader, digest)
    if reads != READS_MINILM or reader.width != WIDTH:
        raise ConfigError(
            f"the pack reads vectors of {reader.width} numbers of embedder {reads!r}; this version has {READS_MINILM!r}"
            f" of {WIDTH}"
        )
    if kind != "minilm":
        raise ConfigError(f"the pack reads vectors of embedder 'minilm'; the embedder here is {kind!r}")
    return PackedMiniLM(n_components, examples, reader, digest)


class PackedEmbedder:
    """Any embedder, or none, and a pack that reads marks and words."""

    def __init__(self, base: Embedder | None, n_components: int, reader: Reader | None, digest: str) -> None:
        self._base = base
        self._n_blank = 0 if base is None else n_components
        self._reader = reader
        self._digest = digest

    @property
    def version(self) -> str:
        """Names both."""
        return _version("none" if self._base is None else self._base.version, self._digest)

    def components_now(self, text: str) -> Components | None:
        """The components where the embedder has them at once; the pack's word always is."""
        found = () if self._base is None else self._base.components_now(text)
        return None if found is None else self._with_told(found, text)

    def submit(self, text: str, callback: Callable[[Components], None]) -> None:
        """As the embedder's own."""
        if self._base is None:
            callback(self._with_told((), text))
        else:
            self._base.submit(text, lambda found: callback(self._with_told(found, text)))

    def close(self) -> None:
        """Stop the embedder."""
        if self._base is not None:
            self._base.close()

    def _with_told(self, found: Components, text: str) -> Components:
        if self._reader is None or not text.strip():
            return found
        return (*(found or (0.0,) * self._n_blank), *self._reader.told(text))


class PackedMiniLM(MiniLMEmbedder):
    """MiniLM, and a pack that reads its vectors."""

    def __init__(
        self, n_components: int, examples: Mapping[str, Sequence[str]] | None, reader: Reader, digest: str
    ) -> None:
        self._reader = reader
        self._digest = digest
        super().__init__(n_components, examples)

    @property
    def version(self) -> str:
        """Names both."""
        return _version(super().version, self._digest)

    def _embed(self, batch: list[Any]) -> None:
        try:
            vectors = self._model.embed([text for text, _ in batch])
            rows = ((vectors - self._mean) @ self._rows.T).tolist()
            told = [self._reader.told(text, vector) for (text, _), vector in zip(batch, vectors, strict=True)]
            found: list[Components] = [(*row, *more) for row, more in zip(rows, told, strict=True)]
        except Exception:  # This thread's outermost loop: one text that breaks the model must not stop the others.
            self.n_failed += len(batch)
            found = [()] * len(batch)
        for (text, callback), components in zip(batch, found, strict=True):
            if components:
                self._remember(text, components)
            self._call(callback, components)


def _version(base: str, digest: str) -> str:
    return f"{base}+pack-{digest[:12]}"
