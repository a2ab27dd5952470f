"""Chance by name: a decision's draws depend on the seed, the stream's name and the decision's number, on nothing else.

Adding a draw in one room moves no draw in another, and two policies in one world meet the same luck (common random
numbers). One counter-based generator (Philox 4x64) per name is repositioned for every decision, which is several
times cheaper than making a generator.
"""

import zlib
from typing import Any

import numpy as np

Generator = np.random.Generator

_WORD = 0xFFFFFFFFFFFFFFFF
_WORDS_PER_INDEX_BITS = 32
"""Counter blocks that one index may use before it would meet the next index."""


class Streams:
    """Named random streams of one seed.

    >>> streams = Streams(7)
    >>> a = streams.at("policy", 3).random()
    >>> b = streams.at("policy", 4).random()
    >>> a == streams.at("policy", 3).random(), a == b
    (True, False)
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator_by_name: dict[str, tuple[Any, dict[str, Any], Generator]] = {}

    def at(self, name: str, index: int) -> Generator:
        """The generator of stream `name`, positioned at `index`. Valid until the next call with that name.

        Args:
            index: any integer; those that differ by a multiple of 2**96 share their draws.
        """
        entry = self._generator_by_name.get(name)
        if entry is None:
            entry = self._open(name)
        philox, state, generator = entry
        position = index << _WORDS_PER_INDEX_BITS
        counter = state["state"]["counter"]
        counter[0] = position & _WORD
        counter[1] = (position >> 64) & _WORD
        philox.state = state
        return generator

    def _open(self, name: str) -> tuple[Any, dict[str, Any], Generator]:
        philox = np.random.Philox(key=(self.seed & _WORD) | (zlib.crc32(name.encode()) << 64))
        state: Any = philox.state
        entry: tuple[Any, dict[str, Any], Generator] = (philox, state, np.random.Generator(philox))
        self._generator_by_name[name] = entry
        return entry
