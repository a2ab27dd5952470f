"""A context is what its specification says, and its version names that."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import ConfigError, Unprocessable
from loadwise.policy.context import ContextSpec

ORACLE = ContextSpec(task_types=("swe", "tau2", "tb2"), domains=("retail", "airline", "telecom"))


def test_the_papers_context_has_23_features() -> None:
    """Bias, three families, three domains and 16 components (B.3)."""
    assert ORACLE.n_features == 23 == len(ORACLE.names) == len(ORACLE.features("swe", None, ()))


@given(
    st.one_of(st.none(), st.text(max_size=8), st.sampled_from(ORACLE.task_types)),
    st.one_of(st.none(), st.text(max_size=8), st.sampled_from(ORACLE.domains)),
    st.lists(st.floats(), max_size=16),
)
def test_features_are_finite_and_one_hot(task_type, domain, components) -> None:
    """Whatever arrives, the vector is finite, its bias is one and each block has at most a single one."""
    x = ORACLE.features(task_type, domain, components)
    assert x.shape == (23,)
    assert np.isfinite(x).all()
    assert x[0] == 1.0
    assert x[1:4].sum() == (task_type in ORACLE.task_types)
    assert x[4:7].sum() == (domain in ORACLE.domains)
    usable = all(abs(component) <= 1e3 for component in components)
    expected = [*components, *[0.0] * (16 - len(components))] if usable else [0.0] * 16
    assert x[7:].tolist() == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1001.0])
def test_one_bad_component_makes_the_embedding_absent(bad: float) -> None:
    """A vector with one coordinate missing points elsewhere: all of it is zero, the rest of the context stands."""
    x = ORACLE.features("tau2", "retail", (0.5, bad, 0.5))
    assert x.tolist() == ORACLE.features("tau2", "retail", ()).tolist()


def test_too_many_components_are_refused() -> None:
    """An embedder of another specification is an error that names both numbers."""
    with pytest.raises(Unprocessable, match="17 components; the limit is n_components=16"):
        ORACLE.features(None, None, [0.0] * 17)


def test_versions_differ_wherever_the_meaning_does() -> None:
    """Every change of the specification, even of an order or between two blocks, changes the version."""
    specs = [
        ContextSpec(),
        ContextSpec(bias=False),
        ContextSpec(n_components=15),
        ContextSpec(task_types=("a", "b")),
        ContextSpec(task_types=("b", "a")),
        ContextSpec(domains=("a", "b")),
        ContextSpec(task_types=("a",), domains=("b",)),
        ContextSpec(embedder="hash-1"),
    ]
    for one, other in itertools.combinations(specs, 2):
        assert one.version != other.version, (one, other)
    assert ContextSpec(task_types=("a", "b")).version == specs[3].version


def test_the_version_is_stable() -> None:
    """Journals hold it: it may not move between processes, machines or releases."""
    assert ORACLE.version == "77e409bcbf6f"
    assert ContextSpec().version == "bb9dcd3b2413"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task_types": ("a", "a")}, "task_types are"),
        ({"domains": ("",)}, "domains are"),
        ({"task_types": "patch"}, "task_types is 'patch'"),
        ({"n_components": -1}, "n_components is -1"),
        ({"n_components": 513}, "n_components is 513"),
        ({"bias": False, "n_components": 0}, "0 features"),
        ({"task_types": tuple(map(str, range(500)))}, "517 features"),
    ],
)
def test_specifications_out_of_range_are_refused(fields, words: str) -> None:
    """The error names the field, the value and the limit."""
    with pytest.raises(ConfigError, match=words):
        ContextSpec(**fields)
