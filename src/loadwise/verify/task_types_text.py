"""What a request looks like, beside what it means: hashed words, runs of characters and shapes of one text.

A sentence embedding says what a text is about. Whether it is an issue report, an order to a shell or an exam question
shows as much in its small words, its punctuation and its layout, which embeddings smooth away. Three bags count them:

    words    words and pairs of neighbours, present or not
    runs     four characters in a row, white space counted once, 1 + log of the count
    shapes   two to four characters in a row after letters, digits and blanks have become one sign each (`Aa 00. `),
             square root of the count

Each is hashed with signs (Weinberger et al. 2009) to 8,192 places and brought to unit length; then they are weighted
against each other, and the embedding has weight one. The weights were chosen on one half of the tasks that
`experiments/results/selector.md` reports on. Nothing here is fitted to any text.
"""

import re
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

HEAD_CHARS = 4096
TAIL_CHARS = 2048
"""A longer text is cut to these first, so that its length costs nothing."""

PLACES = 8192
"""Of each bag."""
WORDS_WEIGHT, RUNS_WEIGHT, SHAPES_WEIGHT = 1.5, 2.5, 0.25
"""Shares of the three in a product of two descriptions; that of the embedding is one."""

Features = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_Hashes = NDArray[np.uint32]

_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_ODD = np.uint32(2654435761)
"""Knuth's multiplicative constant."""


def clip(text: str) -> str:
    """A text with the middle taken out where it is long."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]} {text[-TAIL_CHARS:]}"


def describe(text: str, embedding: NDArray[np.floating] | None = None) -> Features:
    """The three bags and the embedding, one after the other.

    Args:
        embedding: of unit length, or nothing.

    Returns:
        Shape (3 * 8192 + width of the embedding,). The product of two is the weighted sum of their cosines.
    """
    text = clip(text)
    octets = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    parts = [
        _bag([_words(text)], np.sqrt(WORDS_WEIGHT), "presence"),
        _bag([_runs(_squeezed(_LOWER[octets], _BLANK), 4)], np.sqrt(RUNS_WEIGHT), "log"),
        _bag([_runs(_squeezed(_SHAPE[octets], _RUN), n) for n in (2, 3, 4)], np.sqrt(SHAPES_WEIGHT), "root"),
    ]
    if embedding is not None:
        parts.append(np.asarray(embedding, dtype=np.float32))
    return np.concatenate(parts)


def _words(text: str) -> _Hashes:
    words = [crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text.lower())]
    single = np.array(words, dtype=np.uint32)
    pairs = single[:-1] * np.uint32(31) + single[1:] * np.uint32(1000003)
    return np.concatenate((single * _ODD ^ (single >> np.uint32(7)), pairs ^ (pairs >> np.uint32(13))))


def _runs(octets: _Bytes, n: int) -> _Hashes:
    """A hash of every n octets in a row."""
    count = max(len(octets) - n + 1, 0)
    hashes = np.zeros(count, dtype=np.uint32)
    for at in range(n):
        hashes = hashes * np.uint32(1000003) + octets[at : at + count] + np.uint32(1)
    hashes ^= hashes >> np.uint32(15)
    hashes *= _ODD
    return (hashes ^ (hashes >> np.uint32(13))) + np.uint32(n)


def _bag(hashes: list[_Hashes], length: float, count: str) -> Features:
    found, counts = np.unique(np.concatenate(hashes), return_counts=True)
    if not len(found):
        return np.zeros(PLACES, dtype=np.float32)
    values = {"presence": np.ones(len(found)), "log": 1.0 + np.log(counts), "root": np.sqrt(counts)}[count]
    signs = np.where(found >> np.uint32(31), 1.0, -1.0)
    bag = np.bincount((found % np.uint32(PLACES)).astype(np.int64), weights=values * signs, minlength=PLACES)
    norm = float(np.linalg.norm(bag))
    scaled: Features = (bag * (length / norm if norm else 0.0)).astype(np.float32)
    return scaled


def _squeezed(octets: _Bytes, repeats: NDArray[np.bool_]) -> _Bytes:
    """Repetitions of the same octet taken out, for those octets where `repeats` says so."""
    keep = np.ones(len(octets), dtype=np.bool_)
    keep[1:] = ~((octets[1:] == octets[:-1]) & repeats[octets[1:]])
    return octets[keep]


def _table(*ranges: tuple[int, int, int]) -> _Bytes:
    """Octets to octets: from `begin` to before `end` everything becomes `to`, other octets stay."""
    table = np.arange(256, dtype=np.uint8)
    for begin, end, to in ranges:
        table[begin:end] = to
    return table


def _marks(octets: bytes) -> NDArray[np.bool_]:
    marks = np.zeros(256, dtype=np.bool_)
    marks[list(octets)] = True
    return marks


_LOWER = _table((9, 11, 32), (13, 14, 32))
_LOWER[ord("A") : ord("Z") + 1] += 32
_SHAPE = _table((ord("a"), ord("z") + 1, 97), (ord("A"), ord("Z") + 1, 65), (48, 58, 48), (128, 256, 97), (9, 10, 32))
_SHAPE[13] = 32
_BLANK, _RUN = _marks(b" "), _marks(b"aA0 \n")
