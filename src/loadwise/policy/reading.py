"""What a text says about the work it asks for, as numbers: the reader of experience packs.

Marks that need no vocabulary (length, code, tracebacks, paths, questions, ...) and the words by their hash. All of it
is arithmetic on the text, so equal texts give equal numbers on every machine.
"""

import math
import re
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

VERSION = "reading-1"
"""Changes whenever equal texts may get other numbers."""
N_BINS = 1024
"""Words share so many places."""
CHARS_MAX = 8192
"""What is read of a longer text: the first three quarters of this at its begin, the rest at its end."""
TOLD_MAX = 8.0
ROUNDED = 9
"""Decimals that are kept: sums in another order differ in the last ones."""

Array = npt.NDArray[np.float64]

_WORDS = re.compile(r"[a-z_][a-z_0-9]+|[^\sa-z_0-9]")
_COUNTED = (
    re.compile(r"```"),
    re.compile(r"Traceback|Exception\b"),
    re.compile(r"\b\w*Error\b"),
    re.compile(r"[\w/]{1,64}\.(?:py|c|h|cpp|rs|go|js|ts|java|sh|txt|json|csv|md)\b"),
    re.compile(r">>>|^[ \t]*\$ ", re.MULTILINE),
    re.compile(r"https?://"),
    re.compile(r"\b\w+\(\)"),
    re.compile(r"`[^`\n]+`"),
    re.compile(r"\?"),
    re.compile(r"\b(?:should|must|expected|ensure)\b", re.IGNORECASE),
    re.compile(r"\b[A-Z][a-z]+[A-Z]\w+"),
    re.compile(r"^[ \t]*(?:\d{1,4}[.)]|[-*])\s", re.MULTILINE),
)
N_MARKS = len(_COUNTED) + 4


def marks(text: str) -> Array:
    """The marks of a text, shape (N_MARKS,): log lengths, square roots of counts, the share of digits.

    >>> marks("Fix foo.py: it raises KeyError. Why?").round(2).tolist()[:4]
    [3.61, 1.95, 0.69, 0.0]
    """
    text = clipped(text)
    words = text.count(" ") + text.count("\n") + 1
    counted = [math.sqrt(sum(1 for _ in pattern.finditer(text))) for pattern in _COUNTED]
    digits = sum(map(str.isdigit, text)) / max(len(text), 1)
    return np.array(
        [math.log1p(len(text)), math.log1p(words), math.log1p(text.count("\n") + 1), digits, *counted], dtype=np.float64
    )


def bins(text: str) -> npt.NDArray[np.int64]:
    """Places of the words that a text holds, each once, rising.

    >>> len(bins("to be or not to be"))
    4
    """
    words = set(_WORDS.findall(clipped(text).lower()))
    return np.array(sorted({crc32(word.encode("utf-8", "surrogatepass")) % N_BINS for word in words}), dtype=np.int64)


def clipped(text: str) -> str:
    """A text with the middle taken out where it is long."""
    if len(text) <= CHARS_MAX:
        return text
    head = CHARS_MAX * 3 // 4
    return f"{text[:head]} {text[-(CHARS_MAX - head) :]}"


def row(text: str) -> Array:
    """Marks and words of a text, shape (N_MARKS + N_BINS,): each word that is there weighs 1 / sqrt(their number)."""
    found = bins(text)
    features = np.zeros(N_MARKS + N_BINS)
    features[:N_MARKS] = marks(text)
    if len(found):
        features[N_MARKS + found] = 1.0 / math.sqrt(len(found))
    return features


class Reader:
    """The text model of a pack, applied: what a middling model would reach and pay, beyond what the kind of task says.

    >>> blank = np.zeros(N_MARKS + N_BINS)
    >>> Reader(blank, 0.5, blank, -1.0).told("Sort the list")
    (1.0, 0.5, -1.0)
    """

    def __init__(self, success: Array, success_bias: float, cost: Array, cost_bias: float) -> None:
        self._weights = np.stack([success, cost])  # (2, d)
        self._biases = np.array([success_bias, cost_bias])

    @property
    def width(self) -> int:
        """Length of the embedder's vector that it reads; 0 where it reads none."""
        return len(self._weights[0]) - N_MARKS - N_BINS

    def told(self, text: str, vector: npt.NDArray[np.floating[Any]] | None = None) -> tuple[float, float, float]:
        """One (the text was read), the logit of success and the log cost, each within ±`TOLD_MAX`."""
        found = bins(text)
        said = self._biases + self._weights[:, :N_MARKS] @ marks(text)
        if len(found):
            said += self._weights[:, N_MARKS + found].sum(axis=1) / math.sqrt(len(found))
        if vector is not None:
            said += self._weights[:, N_MARKS + N_BINS :] @ np.asarray(vector, dtype=np.float64)
        success, cost = np.clip(np.round(said, ROUNDED), -TOLD_MAX, TOLD_MAX).tolist()
        return 1.0, success, cost
