"""Embeddings by any OpenAI-compatible `/v1/embeddings` (bge-m3 as in ORACLE, B.3), asked from a thread of its own.

Whatever goes wrong there, a request is served without components and without an inferred task type. A server that does
not answer in time is left alone for a while (`reader.REST_S`).
"""

import contextlib
import http.client
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from loadwise.kernel.errors import ConfigError
from loadwise.verify.task_types import SelectionSpec

from .embed import EmbedderSpec
from .reader import Matrix, Reader, Unreachable

ANSWER_MAX_BYTES = 32 * 1024 * 1024
WIDTH_MAX = 16_384


class OpenAIEmbedder(Reader):
    """Reads texts by asking a server.

    Raises:
        ConfigError: the key's environment variable is not set.
    """

    def __init__(
        self,
        spec: EmbedderSpec,
        n_components: int,
        examples: Mapping[str, Sequence[str]],
        selection: SelectionSpec | None,
        environment: Mapping[str, str],
    ) -> None:
        key = None if spec.key_env is None else environment.get(spec.key_env, "").strip()
        if key == "":
            raise ConfigError(f"embedder: environment variable {spec.key_env} is not set or empty")
        super().__init__(
            lambda: EmbeddingServer(spec, key), f"openai-1-{spec.model}", n_components, examples, selection
        )


class EmbeddingServer:
    """The server; one question at a time, each on a connection of its own."""

    batch_max = 32
    is_remote = True

    def __init__(self, spec: EmbedderSpec, key: str | None = None) -> None:
        parts = urlsplit(spec.url or "")
        assert parts.hostname is not None
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"embedder url {spec.url!r}: {error}") from error
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname, port)
        path = parts.path.rstrip("/") or "/v1"
        self._target = path if path.endswith("/embeddings") else f"{path}/embeddings"
        self._model, self._timeout_s = spec.model, spec.timeout_s
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self.width: int | None = None

    def embed(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors, shape (n_texts, width).

        Raises:
            Unreachable: no answer, no access, or an answer that is no embedding.
            ValueError: the server refuses these texts.
        """
        # A lone surrogate, as broken clients send it, is no text to a server.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        body = json.dumps({"model": self._model, "input": clean, "encoding_format": "float"}).encode()
        status, answer = self._ask(body)
        if status in (400, 413, 422):
            raise ValueError(f"the embedding server answered {status}")
        if status != 200:
            raise Unreachable(f"the embedding server answered {status}")
        return self._vectors(answer, len(texts))

    def _ask(self, body: bytes) -> tuple[int, bytes]:
        connection = self._connect(*self._address, timeout=self._timeout_s)
        # A socket's time-out starts anew with every byte; this one does not.
        alarm = threading.Timer(self._timeout_s, _hang_up, (connection,))
        alarm.daemon = True
        alarm.start()
        try:
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_MAX_BYTES + 1)
            return response.status, answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"the embedding server cannot be asked: {error}") from error
        finally:
            alarm.cancel()
            connection.close()

    def _vectors(self, answer: bytes, n_texts: int) -> Matrix:
        try:
            if len(answer) > ANSWER_MAX_BYTES:
                raise ValueError(f"more than {ANSWER_MAX_BYTES} bytes")
            vectors = _by_index(json.loads(answer)["data"], n_texts)
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            if not (np.isfinite(norms).all() and (norms > 0).all()):
                raise ValueError("a vector without a length")
            if vectors.shape[1] != (self.width or vectors.shape[1]) or not 1 <= vectors.shape[1] <= WIDTH_MAX:
                raise ValueError(f"vectors of {vectors.shape[1]} entries")
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
            raise Unreachable(f"the embedding server's answer is no embedding: {error}") from error
        self.width = vectors.shape[1]
        unit: Matrix = (vectors / norms).astype(np.float32)
        return unit


def _by_index(rows: Any, n_texts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The vectors in the order of the texts."""
    found: list[Any] = [None] * n_texts
    for place, row in enumerate(rows):
        index = row.get("index", place)
        if not isinstance(index, int) or not 0 <= index < n_texts or found[index] is not None:
            raise ValueError(f"index {index!r} of {n_texts} texts")
        found[index] = [float(value) for value in row["embedding"]]
        if not all(map(math.isfinite, found[index])):
            raise ValueError("a number that is not finite")
    if any(vector is None for vector in found):
        raise ValueError(f"{len(rows)} vectors for {n_texts} texts")
    return np.array(found, dtype=np.float64)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(2)
