"""Embedders: what turns a program's first request into the components of its context, and tells its task type.

`hash` costs microseconds and answers at once. `minilm` (module `minilm`, extra `embed`) costs tens of milliseconds and
answers from its own thread, `openai` (module `openai_embed`) asks a server from such a thread. A long text is cut:
`hash` reads the first 48 and the last 16 words, the others at most 4,096 and 2,048 characters, of which `minilm` takes
the first 96 and the last 32 tokens. Instructions stand at the begin of a long request, the question often at its end,
and what lies between would only cost time.

Where at least two task types have examples, the same reading tells the type (`loadwise.verify.task_types`); that costs
half a millisecond more, so it happens in the thread, also for `hash`.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args
from urllib.parse import urlsplit
from zlib import crc32

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.verify.task_types import NOTHING_TOLD, SelectionSpec, Told, require_distinct
from loadwise.verify.task_types_text import clip as clip

HEAD_UNITS = 48
TAIL_UNITS = 16
"""Words that `hash` reads at the begin and at the end of a text."""

Kind = Literal["none", "hash", "minilm", "openai"]
KINDS: tuple[str, ...] = get_args(Kind)

Components = tuple[float, ...]


class EmbedderSpec(Fact, frozen=True, kw_only=True):
    """An embedder with its options; one word stands for `{kind: WORD}`.

    Raises:
        ConfigError: an option is missing, out of range, or of another kind.
    """

    kind: Kind
    url: str | None = None
    """Of an OpenAI-compatible server, to which `/embeddings` is added; without a path it means `/v1`."""
    model: str | None = None
    key_env: str | None = None
    """Environment variable with the server's key."""
    timeout_s: float = 1.5
    """Of one question; what is not answered by then is not embedded."""

    def __post_init__(self) -> None:
        if self.kind != "openai":
            given = [name for name in ("url", "model", "key_env") if getattr(self, name) is not None]
            if given:
                raise ConfigError(f"embedder {self.kind!r} has no option {given[0]!r}; only 'openai' has")
            return
        parts = urlsplit(self.url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname or not self.model:
            raise ConfigError(
                f"embedder 'openai' has url {self.url!r} and model {self.model!r}; it needs an http(s) url and a model"
            )
        if not (math.isfinite(self.timeout_s) and 0.0 < self.timeout_s <= 60.0):
            raise ConfigError(f"embedder timeout_s is {self.timeout_s!r}; it must be in (0, 60]")


class Reading(NamedTuple):
    """What was read of one text."""

    components: Components = ()
    """Of its embedding; empty where there is none, which is not an error."""
    told: Told = NOTHING_TOLD
    """Its task type."""


UNREAD = Reading()


class Embedder(Protocol):
    """Reads texts."""

    @property
    def version(self) -> str:
        """Changes whenever equal texts may get other components."""
        ...

    def read_now(self, text: str) -> Reading | None:
        """The reading where that is cheap; None where `submit` must be used."""
        ...

    def submit(self, text: str, callback: Callable[[Reading], None]) -> None:
        """Read elsewhere; `callback` is called exactly once, on any thread, and never raises into the caller."""
        ...

    def close(self) -> None:
        """Stop. Every submitted text gets its callback; later ones are unread at once."""
        ...


def make_embedder(
    spec: str | EmbedderSpec,
    n_components: int,
    examples: Mapping[str, Sequence[str]] | None = None,
    selection: SelectionSpec | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Embedder | None:
    """The embedder of a gateway; None where there is nothing to read for.

    Args:
        spec: one of `KINDS`, or that with options.
        n_components: length of what it gives.
        examples: texts by task type, to which components are fitted and by which types are told.
        selection: how types are told; None tells none.

    Raises:
        ConfigError: the kind is unknown, a package it needs is not installed, or two types share an example.
    """
    if isinstance(spec, str):
        if spec not in KINDS:
            raise ConfigError(f"embedder {spec!r} is unknown; known: {', '.join(KINDS)}")
        spec = EmbedderSpec(kind=spec)  # type: ignore[arg-type]
    given = {name: list(texts) for name, texts in (examples or {}).items()}
    told = selection if selection is not None and is_telling(selection, given) else None
    if spec.kind == "none" or (n_components == 0 and told is None):
        return None
    if told is not None:
        require_distinct(given)
    if spec.kind == "hash" and told is None:
        return HashEmbedder(n_components)
    if spec.kind == "hash":
        from .reader import hash_reader

        return hash_reader(n_components, given, told)
    if spec.kind == "openai":
        from .openai_embed import OpenAIEmbedder

        return OpenAIEmbedder(spec, n_components, given, told, environment)
    from .minilm import MiniLMEmbedder

    return MiniLMEmbedder(n_components, given, told)


def is_telling(selection: SelectionSpec, examples: Mapping[str, Sequence[str]]) -> bool:
    """Whether there is something to tell: a rule, no fixed type, and two types with examples."""
    n_types = sum(any(text.strip() for text in texts) for texts in examples.values())
    return selection.rule != "off" and selection.task_type is None and n_types >= 2


class HashEmbedder:
    """Signed feature hashing of words and pairs of neighbours (Weinberger et al. 2009), of unit length.

        component_j = sum of sign(w) over the words and pairs w with index(w) = j, divided by the norm of them all

    Equal texts give equal bits on every machine: the sums are whole numbers.

    >>> embedder = HashEmbedder(4)
    >>> embedder.components_of("Sort the list")
    (0.8944271909999159, 0.0, 0.0, -0.4472135954999579)
    >>> embedder.components_of(" ")
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

    def components_of(self, text: str) -> Components:
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

    def read_now(self, text: str) -> Reading:
        """The components; no type is told without a thread."""
        return Reading(self.components_of(text))

    def submit(self, text: str, callback: Callable[[Reading], None]) -> None:
        """As `read_now`, at once."""
        callback(self.read_now(text))

    def close(self) -> None:
        """Nothing to stop."""


def _words(text: str) -> list[bytes]:
    words = clip(text).lower().encode("utf-8", "surrogatepass").split(None, HEAD_UNITS)
    if len(words) > HEAD_UNITS:
        words += words.pop().rsplit(None, TAIL_UNITS)[-TAIL_UNITS:]
    return words
