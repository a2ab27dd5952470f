"""An embedder with an experience pack: three components more, which say what the pack reads in the text.

    [the embedder's components | 1 | logit of success | log cost]

Where the pack reads marks and words alone, this takes tens of microseconds beside any embedder. Where it reads an
embedding too, the same vector serves both.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadwise.kernel.errors import ConfigError
from loadwise.policy.reading import Reader as TextReader
from loadwise.verify.task_types import SelectionSpec

from .embed import UNREAD, Embedder, EmbedderSpec, Reading, clip, make_embedder
from .minilm import WIDTH, MiniLMEmbedder, Model
from .reader import Matrix, _Prepared

N_TOLD = 3
"""Components that a pack adds: whether the text was read, its logit of success, its log cost."""
READS_NONE = "none"
READS_MINILM = "minilm-int8-2"
"""The vectors that a pack may read besides marks and words."""


class Loaded(NamedTuple):
    """What a pack reads texts with."""

    reader: TextReader | None
    """None where it reads none: its components stay zero."""
    reads: str
    """The embedder whose vectors it reads, or `none`."""
    digest: str


def pack_vectors(kind: str) -> tuple[Callable[[Sequence[str]], NDArray[np.float64]] | None, str]:
    """What turns texts into the vectors of embedder `kind` for fitting a pack, and their version.

    Raises:
        ConfigError: the kind is unknown, or a package it needs is not installed.
    """
    if kind in ("none", "hash"):
        return None, READS_NONE
    if kind != "minilm":
        raise ConfigError(f"embedder {kind!r} is unknown here; a pack reads none, hash or minilm")
    model = Model()

    def vectors(texts: Sequence[str]) -> NDArray[np.float64]:
        # One by one: padding would change them.
        return np.concatenate([model.embed([clip(text)]) for text in texts]).astype(np.float64)

    return vectors, READS_MINILM


def packed_embedder(
    spec: str | EmbedderSpec,
    n_components: int,
    examples: Mapping[str, Sequence[str]] | None,
    loaded: Loaded,
    selection: SelectionSpec | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Embedder:
    """The embedder that `make_embedder` makes, with a pack.

    Raises:
        ConfigError: the pack reads vectors of another embedder, or as `make_embedder`.
    """
    reader, kind = loaded.reader, spec.kind if isinstance(spec, EmbedderSpec) else spec
    if reader is None or loaded.reads == READS_NONE:
        if reader is not None and reader.width:
            raise ConfigError(f"the pack's text model reads vectors of {reader.width} numbers of no embedder")
        base = make_embedder(spec, n_components, examples, selection, environment)
        return PackedEmbedder(base, n_components if kind != "none" else 0, loaded)
    if loaded.reads != READS_MINILM or reader.width != WIDTH:
        raise ConfigError(
            f"the pack reads vectors of {reader.width} numbers of embedder {loaded.reads!r}; this version has"
            f" {READS_MINILM!r} of {WIDTH}"
        )
    if kind != "minilm":
        raise ConfigError(f"the pack reads vectors of embedder 'minilm'; the embedder here is {kind!r}")
    return PackedMiniLM(n_components, examples, selection, reader, loaded.digest)


class PackedEmbedder:
    """Any embedder, or none, and a pack that reads marks and words."""

    def __init__(self, base: Embedder | None, n_blank: int, loaded: Loaded) -> None:
        self._base, self._n_blank, self._loaded = base, n_blank, loaded

    @property
    def version(self) -> str:
        """Names both."""
        return _version("none" if self._base is None else self._base.version, self._loaded.digest)

    @property
    def confused(self) -> list[tuple[str, int, str]]:
        """As the embedder's own."""
        return list(getattr(self._base, "confused", []))

    def read_now(self, text: str) -> Reading | None:
        """The reading where the embedder has it at once; the pack's word always is."""
        found = UNREAD if self._base is None else self._base.read_now(text)
        return None if found is None else self._with_told(found, text)

    def submit(self, text: str, callback: Callable[[Reading], None]) -> None:
        """As the embedder's own."""
        if self._base is None:
            callback(self._with_told(UNREAD, text))
        else:
            self._base.submit(text, lambda found: callback(self._with_told(found, text)))

    def close(self) -> None:
        """Stop the embedder."""
        if self._base is not None:
            self._base.close()

    def _with_told(self, found: Reading, text: str) -> Reading:
        if self._loaded.reader is None or not text.strip():
            return found
        components = found.components or (0.0,) * self._n_blank
        return found._replace(components=(*components, *self._loaded.reader.told(text)))


class PackedMiniLM(MiniLMEmbedder):
    """MiniLM, and a pack that reads its vectors."""

    def __init__(
        self,
        n_components: int,
        examples: Mapping[str, Sequence[str]] | None,
        selection: SelectionSpec | None,
        reader: TextReader,
        digest: str,
    ) -> None:
        self._pack_reader = reader
        super().__init__(n_components, examples, selection)
        self.version = _version(self.version, digest)

    def _readings(self, texts: list[str], vectors: Matrix, prepared: _Prepared) -> list[Reading]:
        found = super()._readings(texts, vectors, prepared)
        told = [self._pack_reader.told(text, vector) for text, vector in zip(texts, vectors, strict=True)]
        return [
            reading._replace(components=(*reading.components, *more)) for reading, more in zip(found, told, strict=True)
        ]


def _version(base: str, digest: str) -> str:
    return f"{base}+pack-{digest[:12]}"
