"""Reads texts in a thread of its own: embeds them in batches, projects to components, tells task types.

Theory of operation. The unit vector e (W wide) of a text becomes n components by the rows of an orthonormal matrix M:

    without examples    sqrt(W/n) M e, the rows of M cosines of well-spaced frequencies with scrambled signs: a
                        subsampled randomised transform (Ailon and Chazelle 2009), given by rule, so that no file and
                        no random number generator fixes it. Its expected length is one.
    with examples       M (e - mean), the first rows the principal components of the examples' vectors, as many as
                        they have, the others as above and orthogonal to these.

What embeds stands behind a bounded queue; a text that finds it full, or would wait too long, is not read at all. A
source in this process is prepared before the first text. One that is asked over a network is prepared when it first
answers, and left alone for a while when it does not: a text that comes meanwhile is unread at once, so nobody waits for
a server that is down.
"""

import hashlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loadwise.kernel.errors import ConfigError
from loadwise.verify.task_types import SelectionSpec, TypeSelector, take_evenly
from loadwise.verify.task_types_text import clip, describe

from .embed import UNREAD, HashEmbedder, Reading

COMPONENTS_MAX = 256
QUEUE_MAX = 512
"""Texts that wait; the next ones are not read."""
WAIT_MAX_S = 1.0
"""A text that would wait longer, by what texts have taken lately, is not read: its turn had better go on at once."""
CACHE_MAX = 4096
"""Texts whose reading is remembered: agents of one kind often begin with the same words."""
REST_S = 5.0
"""How long a server that did not answer is not asked again."""

Matrix = NDArray[np.float32]
_Job = tuple[str, Callable[[Reading], None]]


class Unreachable(Exception):
    """A source gives nothing now, whatever the text."""


class Source(Protocol):
    """What embeds."""

    batch_max: int
    """Texts embedded at once."""
    is_remote: bool
    width: int | None
    """Of its vectors; None where it is not known before the first."""

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors, shape (n_texts, width).

        Raises:
            Unreachable: nothing can be embedded now.
            Exception: these texts cannot be embedded.
        """
        ...


class _Prepared(NamedTuple):
    """What the examples gave."""

    mean: Matrix
    rows: Matrix
    selector: TypeSelector | None


class Reader:
    """Reads texts in its own thread.

    Args:
        make_source: makes what embeds, once.
        name: of the source and its rule; part of the version.
        n_components: 0 to 256.
        examples: texts by task type; at most 128 are used, evenly over the types.
        selection: how task types are told; None tells none.

    Raises:
        ConfigError: the number of components is out of range, or what `make_source` raises.
    """

    def __init__(
        self,
        make_source: Callable[[], Source],
        name: str,
        n_components: int,
        examples: Mapping[str, Sequence[str]],
        selection: SelectionSpec | None = None,
    ) -> None:
        if not 0 <= n_components <= COMPONENTS_MAX:
            raise ConfigError(f"n_components is {n_components!r}; this embedder gives 0 to {COMPONENTS_MAX}")
        self._n_components, self._selection = n_components, selection
        self._examples = take_evenly({key: list(texts) for key, texts in examples.items()})
        self._texts = [text for texts in self._examples.values() for text in texts]
        self.version = self._named(name)
        """Names source and projection, and the examples it was fitted to."""
        self._source = make_source()
        self._prepared = None if self._source.is_remote else self._prepare()
        self._rests_until_s = 0.0
        self._text_s = 0.0
        """Seconds that a text takes, lately."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE_MAX)
        self._known: OrderedDict[bytes, Reading] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self.n_skipped = 0
        """Texts that found the queue full or slow, or the server at rest."""
        self.n_failed = 0
        """Texts that could not be embedded, and callbacks that raised."""
        self.problem: str | None = None
        """What went wrong last."""
        self._thread = threading.Thread(target=self._run, name="embedder", daemon=True)
        self._thread.start()

    @property
    def confused(self) -> list[tuple[str, int, str]]:
        """Examples that look like another type to the others; see `TypeSelector.confused`."""
        selector = None if self._prepared is None else self._prepared.selector
        return [] if selector is None else selector.confused()

    def read_now(self, text: str) -> Reading | None:
        """The reading of a text that was read before; None for any other."""
        key = _key(clip(text))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        return known

    def submit(self, text: str, callback: Callable[[Reading], None]) -> None:
        """Read a text; `callback` hears `UNREAD` where that is not possible."""
        text = clip(text)
        with self._lock:  # so that nothing is put behind the end that `close` puts
            is_taken = not self._is_closed and bool(text.strip())
            if is_taken:
                is_taken = self._jobs.qsize() * self._text_s <= WAIT_MAX_S and self._put((text, callback))
                self.n_skipped += not is_taken
        if not is_taken:
            callback(UNREAD)

    def _put(self, job: _Job) -> bool:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Stop after the running batch; texts that still wait are not read."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        waiting: list[_Job] = []
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                waiting.append(job)
        self._jobs.put(None)
        for _, callback in waiting:
            self._call(callback, UNREAD)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            batch = [job]
            is_last = False
            while len(batch) < self._source.batch_max:
                try:
                    more = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    is_last = True
                    break
                batch.append(more)
            begun_at_s = time.monotonic()
            readings = self._read([text for text, _ in batch])
            self._text_s += 0.2 * ((time.monotonic() - begun_at_s) / len(batch) - self._text_s)
            for (text, callback), reading in zip(batch, readings, strict=True):
                if reading is not UNREAD:
                    self._remember(text, reading)
                self._call(callback, reading)
            if is_last:
                return

    def _read(self, texts: list[str]) -> list[Reading]:
        """This thread's outermost guard: whatever goes wrong, every text gets a reading."""
        if time.monotonic() < self._rests_until_s:
            self.n_skipped += len(texts)
            return [UNREAD] * len(texts)
        try:
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._readings(texts, self._source.embed(texts), self._prepared)
        except Exception as error:
            self.problem = str(error) or type(error).__name__
            if self._prepared is None or isinstance(error, Unreachable):
                self._rests_until_s = time.monotonic() + REST_S
            elif len(texts) > 1:  # one text that breaks the source must not stop the others
                return [self._read([text])[0] for text in texts]
        self.n_failed += len(texts)
        return [UNREAD] * len(texts)

    def _readings(self, texts: list[str], vectors: Matrix, prepared: _Prepared) -> list[Reading]:
        components = self._components(vectors, prepared)
        if prepared.selector is None:
            return [Reading(tuple(row)) for row in components]
        rows = zip(texts, vectors, components, strict=True)
        return [Reading(tuple(row), prepared.selector.tell(self._described(text, e))) for text, e, row in rows]

    def _components(self, vectors: Matrix, prepared: _Prepared) -> list[list[float]]:
        found: list[list[float]] = ((vectors - prepared.mean) @ prepared.rows.T).tolist()
        return found

    def _described(self, text: str, vector: Matrix) -> Matrix:
        """What the rule compares: the paper's the bare embedding."""
        assert self._selection is not None
        return vector if self._selection.rule == "prototype" else describe(text, vector)

    def _prepare(self) -> _Prepared:
        """Embed the examples, fit components and task types to them."""
        if not self._texts:
            width = self._source.embed(["."]).shape[1] if self._source.width is None else self._source.width
            return _Prepared(*project(np.zeros((0, width), dtype=np.float32), self._n_components), None)
        # One by one where that costs nothing more: padding would change vectors.
        step = self._source.batch_max if self._source.is_remote else 1
        texts = [clip(text) for text in self._texts]
        parts = [self._source.embed(texts[at : at + step]) for at in range(0, len(texts), step)]
        vectors = np.concatenate(parts)
        selector = None
        if self._selection is not None:
            described = iter([self._described(text, vector) for text, vector in zip(texts, vectors, strict=True)])
            by_type = {name: [next(described) for _ in of] for name, of in self._examples.items()}
            selector = TypeSelector(self._selection, by_type)
        return _Prepared(*project(vectors, self._n_components), selector)

    def _named(self, name: str) -> str:
        if len(self._texts) < 2:
            return f"{name}-{self._n_components}-fixed"
        content = "\0".join(map(clip, self._texts)).encode("utf-8", "surrogatepass")
        return f"{name}-{self._n_components}-fitted-{hashlib.sha256(content).hexdigest()[:12]}"

    def _remember(self, text: str, reading: Reading) -> None:
        with self._lock:
            self._known[_key(text)] = reading
            if len(self._known) > CACHE_MAX:
                self._known.popitem(last=False)

    def _call(self, callback: Callable[[Reading], None], reading: Reading) -> None:
        try:
            callback(reading)
        except Exception:  # As in `_read`.
            self.n_failed += 1


def _key(text: str) -> bytes:
    """What a text is remembered by: a few bytes, and not what it says."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def fixed_rows(n_rows: int, width: int = 384) -> Matrix:
    """The projection that is given by rule: shape (n_rows, width), orthonormal.

    >>> rows = fixed_rows(16)
    >>> bool(np.allclose(rows @ rows.T, np.eye(16), atol=1e-6))
    True
    """
    n_digests = -(-width // 256)
    digest = b"".join(hashlib.sha256(f"loadwise minilm signs {i}".encode()).digest() for i in range(n_digests))
    signs = 1.0 - 2.0 * np.unpackbits(np.frombuffer(digest, dtype=np.uint8))[:width].astype(np.float64)
    frequencies = 1 + np.arange(n_rows) * (width - 1) // n_rows
    angles = np.pi / width * np.outer(frequencies, np.arange(width) + 0.5)
    rows: Matrix = (np.sqrt(2.0 / width) * np.cos(angles) * signs).astype(np.float32)
    return rows


def principal_rows(vectors: Matrix, n_rows: int) -> Matrix:
    """The leading principal components of vectors, shape (at most n_rows, width); the largest entry of each is > 0."""
    _, spread, rows = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    rows = rows[: min(n_rows, int((spread > 1e-6).sum()))]
    largest = np.abs(rows).argmax(axis=1)
    signed: Matrix = rows * np.sign(rows[np.arange(len(rows)), largest])[:, None]
    return signed


def project(vectors: Matrix, n_components: int) -> tuple[Matrix, Matrix]:
    """What is taken off a vector, and what it is multiplied with.

    Raises:
        ConfigError: more components are asked for than the vectors are wide.
    """
    width = vectors.shape[1]
    if n_components > width:
        raise ConfigError(f"n_components is {n_components!r}; the embedder's vectors have {width} entries")
    if n_components == 0:
        return np.zeros(width, dtype=np.float32), np.zeros((0, width), dtype=np.float32)
    if len(vectors) < 2:
        scale = np.float32(np.sqrt(width / n_components))
        return np.zeros(width, dtype=np.float32), scale * fixed_rows(n_components, width)
    leading = principal_rows(vectors, n_components)
    basis, triangle = np.linalg.qr(np.concatenate((leading, fixed_rows(n_components, width)[len(leading) :])).T)
    rows: Matrix = (basis * np.sign(np.diag(triangle))).T.astype(np.float32)
    return vectors.mean(axis=0), rows


class _HashSource:
    """The hashing embedder's components as vectors."""

    batch_max = 16
    is_remote = False

    def __init__(self, n_components: int) -> None:
        self._embedder = HashEmbedder(n_components) if n_components else None
        self._n_components = n_components
        self.width: int | None = n_components

    def embed(self, texts: Sequence[str]) -> Matrix:
        embedder = self._embedder
        if embedder is None:
            return np.zeros((len(texts), 0), dtype=np.float32)
        rows = [embedder.components_of(text) or (0.0,) * self._n_components for text in texts]
        return np.array(rows)  # in double precision: the components are those that `HashEmbedder` gives


class _HashReader(Reader):
    """Tells task types by words and shapes alone; its components are those of `HashEmbedder`."""

    def _components(self, vectors: Matrix, prepared: _Prepared) -> list[list[float]]:
        found: list[list[float]] = vectors.tolist()
        return found

    def _described(self, text: str, vector: Matrix) -> Matrix:
        return describe(text)


def hash_reader(n_components: int, examples: Mapping[str, Sequence[str]], selection: SelectionSpec | None) -> Reader:
    """Hashed words as components, and task types without a model."""
    reader = _HashReader(lambda: _HashSource(n_components), "hash-1", n_components, examples, selection)
    reader.version = f"hash-1-{n_components}"  # its components do not depend on examples
    return reader
