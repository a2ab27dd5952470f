"""A dump holds everything, and damage to it is found."""

import msgspec
import numpy as np
import pytest

from loadwise.kernel.errors import SchemaMismatch
from loadwise.policy.base import Feedback
from loadwise.policy.linear import LinUCB
from loadwise.policy.state import LearnerState


def trained() -> LinUCB:
    policy = LinUCB()
    policy.observe(0, "a", np.ones(2))
    policy.learn(Feedback(decision_id=0, candidate="a", x=np.ones(2), reward=1.0))
    return policy


def refuse(change, words: str) -> None:
    """Loading a dump changed by `change` is refused with `words`, and the loading policy stays as it was."""
    state = msgspec.msgpack.decode(trained().dump())
    change(state)
    policy = trained()
    before = policy.dump()
    with pytest.raises(SchemaMismatch, match=words):
        policy.load(msgspec.msgpack.encode(state))
    assert policy.dump() == before


def put(field: str, value, inside: str | None = None):
    """A change that sets one field."""
    return lambda state: (state[inside] if inside else state).__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("format", 2), "has format 2; this version reads 1"),
        (put("names", ["a", "b"]), "expected"),
        (put("names", ["a", "a"]), "names a candidate twice"),
        (put("surplus", 1), "unknown field `surplus`"),
        (put("n_features", [3], "counts"), "expected"),
        (put("n_features", [100_000], "counts"), "the limits are 512"),
        (put("n_decisions", [-1], "counts"), "expected 1 numbers >= 0"),
        (put("n_decisions", [], "counts"), "expected 1 numbers >= 0"),
        (lambda state: state["arrays"].pop("thetas"), "lacks array 'thetas'"),
        (put("thetas", {"shape": [1, 2], "data": b"\0" * 8}, "arrays"), "in 8 bytes"),
        (put("thetas", {"shape": [1, 2], "data": np.array([np.nan, 0]).tobytes()}, "arrays"), "not finite"),
    ],
)
def test_damage_is_found(change, words: str) -> None:
    """Wrong versions, shapes, counts and values are refused before anything is replaced."""
    refuse(change, words)


def test_every_truncation_is_refused() -> None:
    """A dump cut short anywhere is no dump."""
    data = trained().dump()
    for length in range(0, len(data), 7):
        with pytest.raises(SchemaMismatch):
            LinUCB().load(data[:length])


def test_dumps_are_equal_where_states_are() -> None:
    """Equal states give equal bytes, and they decode to the public form."""
    assert trained().dump() == trained().dump()
    state = msgspec.msgpack.decode(trained().dump(), type=LearnerState)
    assert state.policy == "linucb"
    assert state.names == ("a",)
    np.testing.assert_allclose(state.array("all_sums", (1, 2, 2))[0], [[2.0, 1.0], [1.0, 2.0]])
