"""An embedder with a pack says what the embedder says, and three things more."""

from __future__ import annotations

from threading import Event

import numpy as np
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.policy.reading import N_BINS, N_MARKS, Reader
from loadwise.runner.embed import HashEmbedder, Reading
from loadwise.runner.packed import READS_MINILM, READS_NONE, WIDTH, Loaded, pack_vectors, packed_embedder


def reader(width: int = 0) -> Reader:
    """Weights that count marks, and the sum of the vector."""
    weights = np.concatenate([np.full(N_MARKS, 0.01), np.zeros(N_BINS), np.ones(width)])
    return Reader(weights, 0.0, -weights, 0.0)


def test_words_and_marks_join_any_embedder() -> None:
    """The embedder's own components come first, unchanged."""
    text = "Sort the list"
    both = packed_embedder("hash", 4, None, Loaded(reader(), READS_NONE, "d")).read_now(text).components
    alone = packed_embedder("none", 0, None, Loaded(reader(), READS_NONE, "d")).read_now(text).components
    assert both == (*HashEmbedder(4).components_of(text), *reader().told(text))
    assert alone == reader().told(text)


def test_a_blank_text_has_no_embedding() -> None:
    """Nor has it with a pack; and a pack without texts adds nothing."""
    assert packed_embedder("hash", 4, None, Loaded(reader(), READS_NONE, "d")).read_now(" ") == Reading()
    assert packed_embedder("none", 4, None, Loaded(None, READS_NONE, "d")).read_now("Sort") == Reading()


def test_submitting_gives_the_same() -> None:
    """Whichever way it is asked."""
    embedder = packed_embedder("hash", 4, None, Loaded(reader(), READS_NONE, "d"))
    heard: list[Reading] = []
    embedder.submit("Sort the list", heard.append)
    embedder.close()
    assert heard == [embedder.read_now("Sort the list")]


def test_the_version_names_embedder_and_pack() -> None:
    """Another pack is another context."""
    versions = {packed_embedder(kind, 4, None, Loaded(reader(), READS_NONE, digest)).version
                for kind in ("hash", "none") for digest in ("a" * 64, "b" * 64)}  # fmt: skip
    assert len(versions) == 4


@pytest.mark.parametrize(
    ("kind", "width", "reads", "said"),
    [
        ("hash", WIDTH, READS_MINILM, "embedder here is 'hash'"),
        ("minilm", 7, READS_MINILM, "vectors of 7 numbers"),
        ("minilm", WIDTH, "other", "embedder 'other'"),
        ("hash", 3, READS_NONE, "of no embedder"),
    ],
)
def test_a_pack_for_other_vectors_is_refused(kind: str, width: int, reads: str, said: str) -> None:
    """Each says what it reads and what there is."""
    with pytest.raises(ConfigError, match=said):
        packed_embedder(kind, 4, None, Loaded(reader(width), reads, "d"))


def test_minilm_vectors_serve_both() -> None:
    """The pack reads the vector of the text that the components are made of."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tokenizers")
    try:
        vectors, version = pack_vectors("minilm")
    except ConfigError as error:
        pytest.skip(error.message)
    assert vectors is not None
    assert version == READS_MINILM
    text = "Sort the list"
    embedder = packed_embedder("minilm", 4, None, Loaded(reader(WIDTH), READS_MINILM, "d"))
    heard: list[Reading] = []
    done = Event()
    embedder.submit(text, lambda found: (heard.append(found), done.set()))
    assert done.wait(30.0)
    embedder.close()
    assert len(heard[0].components) == 7
    assert heard[0].components[4:] == pytest.approx(reader(WIDTH).told(text, vectors([text])[0]), abs=1e-4)
    assert embedder.read_now(text) == heard[0]
