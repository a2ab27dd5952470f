"""Embedders: equal texts get equal components, long texts cost no more, and nothing that was submitted is lost."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError
from loadwise.policy.context import ContextSpec
from loadwise.runner.embed import HashEmbedder, Reading, clip, make_embedder

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8)


@given(st.text(), st.integers(1, 64))
def test_hash_components_are_a_unit_vector_or_nothing(text: str, n: int) -> None:
    """Any text gives n finite components of unit length, or none at all."""
    components = HashEmbedder(n).components_of(text)
    if components:
        assert len(components) == n
        assert math.isclose(math.fsum(value * value for value in components), 1.0, rel_tol=1e-12)
    ContextSpec(n_components=n).features(None, None, components)


def test_hash_takes_text_that_is_no_unicode() -> None:
    """A lone surrogate, as broken clients send it, is text like any other."""
    assert HashEmbedder(16).components_of("a \ud800 b")


@given(st.lists(WORDS, min_size=65, max_size=80), WORDS)
def test_hash_ignores_the_middle_of_a_long_text(words: list[str], other: str) -> None:
    """Words after the 48th that are not among the last 16 change nothing."""
    embedder = HashEmbedder(16)
    changed = [*words[:48], other, *words[-16:]]
    assert embedder.components_of(" ".join(words)) == embedder.components_of("\n".join(changed))


def test_hash_sees_begin_end_and_order() -> None:
    """A changed first word, a changed last word and another order give other components."""
    embedder = HashEmbedder(64)
    words = [f"word{i}" for i in range(100)]
    base = embedder.components_of(" ".join(words))
    assert base != embedder.components_of(" ".join(["new", *words[1:]]))
    assert base != embedder.components_of(" ".join([*words[:-1], "new"]))
    assert base != embedder.components_of(" ".join(reversed(words)))


def test_hash_knows_no_case_and_no_white_space() -> None:
    """What clients rewrite does not count."""
    embedder = HashEmbedder(16)
    assert embedder.components_of("Sort  the\nLIST ") == embedder.components_of("sort the list")


def test_hash_is_equal_in_another_process() -> None:
    """Components do not depend on the hash seed of the interpreter."""
    program = "from loadwise.runner.embed import HashEmbedder; print(HashEmbedder(16).components_of('a b c d'))"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("0", "1")
    }
    assert said == {f"{HashEmbedder(16).components_of('a b c d')}\n"}


@given(st.text(max_size=40), st.integers(0, 20_000))
def test_clip_bounds_what_is_read(text: str, times: int) -> None:
    """However long a text is, what is read of it is bounded, and a short one is whole."""
    long = text * times
    assert len(clip(long)) <= 4096 + 2048 + 1
    if len(long) <= 6144:
        assert clip(long) == long


def test_submit_of_the_hash_answers_at_once() -> None:
    """The callback has been called when `submit` returns."""
    heard: list[Reading] = []
    embedder = HashEmbedder(4)
    embedder.submit("a b", heard.append)
    assert heard == [embedder.read_now("a b")]
    assert heard[0].components == embedder.components_of("a b")


def test_make_embedder_makes_what_is_asked() -> None:
    """No embedder where there is nothing to embed into."""
    assert make_embedder("none", 16) is None
    assert make_embedder("hash", 0) is None
    made = make_embedder("hash", 8)
    assert made is not None
    assert made.version == "hash-1-8"
    assert HashEmbedder(9).version != made.version


@pytest.mark.parametrize(("kind", "n"), [("bge", 16), ("hash", -1)])
def test_what_cannot_be_made_is_a_config_error(kind: str, n: int) -> None:
    """An unknown kind names the known ones; a length below one is refused."""
    with pytest.raises(ConfigError, match=r"none, hash, minilm|must be >= 1"):
        make_embedder(kind, n)
