"""The emulated models' success table: a committed file, fixed before any learner runs.

Its header says where the figures come from and how they were derived (`experiments/demo_success_table.py`).
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files

import msgspec

from loadwise.demo.task import FAMILIES, LEVELS, Family
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact


class UsdPerMillion(Fact, frozen=True, kw_only=True):
    """List price of a million tokens."""

    input: float
    output: float

    def __post_init__(self) -> None:
        for name, price in (("input", self.input), ("output", self.output)):
            if not (math.isfinite(price) and price >= 0):
                raise ValueError(f"usd_per_million.{name} is {price!r}: it must be finite and at least 0")

    def cost_usd(self, input_tokens: int, output_tokens: int) -> float:
        """Price a number of tokens."""
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


class EmulatedModel(Fact, frozen=True, kw_only=True):
    """One emulated model's profile."""

    profile_of: str
    """The real model whose published outcomes these are."""
    usd_per_million: UsdPerMillion
    output_tokens: dict[Family, int]
    """Mean completion tokens of one whole program."""
    success: dict[Family, list[float]]
    """Probability of a right answer by difficulty: (LEVELS,), level 1 first."""

    def __post_init__(self) -> None:
        for name, cells in (("success", self.success), ("output_tokens", self.output_tokens)):
            if set(cells) != set(FAMILIES):
                raise ValueError(f"{name} has families {sorted(cells)}: it must have {sorted(FAMILIES)}")
        for family, row in self.success.items():
            if len(row) != LEVELS or not all(0.0 <= p <= 1.0 for p in row):
                raise ValueError(f"success.{family} is {row!r}: it must be {LEVELS} probabilities")
        for family, n in self.output_tokens.items():
            if n < 1:
                raise ValueError(f"output_tokens.{family} is {n!r}: it must be at least 1")


class SuccessTable(Fact, frozen=True, kw_only=True):
    """All emulated models, weakest first, with the size and the graders of the sample they rest on."""

    version: int
    questions: dict[Family, int]
    """Published questions behind each family."""
    graders: list[str]
    """Models that graded the difficulty of the questions; none of them is emulated."""
    models: dict[str, EmulatedModel]

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"success table version is {self.version!r}: this program reads version 1")
        if not self.models:
            raise ValueError("success table has no models")


def read_table(text: bytes) -> SuccessTable:
    """Parse a success table strictly.

    Raises:
        ConfigError: not YAML, an unknown key, a wrong type, or a figure out of range; names the place.
    """
    try:
        return msgspec.yaml.decode(text, type=SuccessTable)
    except msgspec.DecodeError as error:
        raise ConfigError(f"success table: {error}") from error


@cache
def packaged_table() -> SuccessTable:
    """Read the table that the package carries."""
    return read_table(files("loadwise.demo").joinpath("success_table.yaml").read_bytes())
