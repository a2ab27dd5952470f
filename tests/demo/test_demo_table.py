"""The success table: committed, strict, and sourced."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from loadwise.demo.table import packaged_table, read_table
from loadwise.demo.task import FAMILIES, LEVELS
from loadwise.kernel.errors import ConfigError

TEXT = files("loadwise.demo").joinpath("success_table.yaml").read_bytes()


def test_the_packaged_table_is_whole_and_says_where_it_comes_from() -> None:
    """Three models, every family and level, and a header with source, licence and rules."""
    table = packaged_table()
    assert list(table.models) == ["small", "medium", "large"]
    for model in table.models.values():
        assert set(model.success) == set(FAMILIES)
        assert all(len(row) == LEVELS for row in model.success.values())
        assert model.profile_of not in table.graders
    header = TEXT.decode().split("version:")[0]
    for word in ("MMLU-Pro", "Apache-2.0", "f418b116", "Difficulty", "Prices"):
        assert word in header


def test_prices_price_tokens() -> None:
    """Dollars are per million tokens, input and output apart."""
    price = packaged_table().models["large"].usd_per_million
    assert price.cost_usd(1_000_000, 0) == pytest.approx(price.input)
    assert price.cost_usd(0, 500_000) == pytest.approx(price.output / 2)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("version: 1", "version: 2", "reads version 1"),
        ("version: 1", "version: 1\nextra: 2", "unknown field"),
        ("input: 0.2,", "input: -0.2,", "at least 0"),
        ("input: 0.2,", "input: .nan,", "finite"),
        ("[0.683,", "[1.683,", "5 probabilities"),
        ("[0.683,", "[.nan, 0.683,", "5 probabilities"),
        ("[0.683,", "[", "5 probabilities"),
        ("      arithmetic: [0.683", "      algebra: [0.683", "algebra"),
        ("output_tokens: {arithmetic: 115", "output_tokens: {arithmetic: 0", "at least 1"),
    ],
)
def test_a_damaged_table_is_refused(old: str, new: str, why: str) -> None:
    """Unknown keys, wrong versions and figures out of range are named."""
    damaged = TEXT.decode().replace(old, new, 1)
    assert damaged != TEXT.decode()
    with pytest.raises(ConfigError, match=why):
        read_table(damaged.encode())


def test_the_table_can_be_made_again() -> None:
    """The committed file is what its script prints from the published outcomes, byte for byte."""
    root = Path(__file__).parents[2]
    outcomes = root.parent / "shared" / "data"
    if not (outcomes / "outcomes" / "mmlu_pro.parquet").exists():
        pytest.skip(f"the published outcomes are not at {outcomes}")
    pytest.importorskip("pyarrow", reason="reading the published outcomes needs pyarrow (extra: lab)")
    made = subprocess.run(
        [sys.executable, str(root / "experiments" / "demo_success_table.py"), str(outcomes)],
        capture_output=True,
        check=True,
    )
    assert made.stdout == TEXT
