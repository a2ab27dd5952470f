"""A pool file with `--set` above it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import POOL
from hypothesis import given
from hypothesis import strategies as st

from loadwise.cli.pool import apply_setting, read_pool
from loadwise.kernel.errors import ConfigError

KEYS = st.text(st.characters(categories=("L", "N"), include_characters="_-"), min_size=1, max_size=8)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """The pool file."""
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    return path


def test_settings_win_and_later_ones_win_over_earlier(pool: Path) -> None:
    """Flat keys of the pool file, numbers as numbers."""
    config = read_pool(pool, ["router.hold_max_s=30", "router.hold_max_s=31", "router.seconds_per_point=2"])
    assert config.router.hold_max_s == 31.0
    assert config.router.trade.seconds_per_point == 2
    assert read_pool(pool).router.hold_max_s == 10.0


def test_settings_reach_new_sections_and_named_backends(pool: Path) -> None:
    """A section that the file lacks is begun; a backend is found by name, dots or not, or by number."""
    config = read_pool(
        pool, ["gateway.port=0", "backends.a.slots=7", "backends.b.1.slots=8", "models.big-1.5b.context_tokens=9"]
    )
    assert config.gateway == {"port": 0}
    assert [backend.slots for backend in config.backends] == [7, 8]
    assert config.models["big-1.5b"].context_tokens == 9
    assert read_pool(pool, ["backends.1.slots=5"]).backends[1].slots == 5


def test_values_are_yaml(pool: Path) -> None:
    """Lists, mappings, null and strings."""
    config = read_pool(pool, ["router.policy={name: linucb, alpha: 0.1}", "gateway={journal: null, host: '::1'}"])
    assert config.router.policy.options["alpha"] == 0.1
    assert config.gateway == {"journal": None, "host": "::1"}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("router.hold_max_s", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("router..x=3", "KEY=VALUE"),
        ("router.hold_maxs=3", "unknown key 'hold_maxs'; valid keys"),
        ("nope=3", "unknown key 'nope'; valid keys"),
        ("router.hold_max_s=soon", "router"),
        ("router.hold_max_s=-1", "hold_max_s is -1"),
        ("router.hold_max_s.x=1", "has no key 'x'"),
        ("backends.z.slots=1", "no entry is named 'z'; there are: a, b.1"),
        ("backends.a=1", "is an entry of a list"),
        ("router.policy={", "not valid YAML"),
        ("preset=nope", "preset 'nope' is unknown"),
        ("models=[]", "models"),
        ("backends=5", "backends"),
        ("router=[1]", "router is [1]"),
    ],
)
def test_a_wrong_setting_says_why(pool: Path, setting: str, said: str) -> None:
    """Every wrong setting is a ConfigError that names it."""
    with pytest.raises(ConfigError) as error:
        read_pool(pool, [setting])
    assert said in error.value.message


@pytest.mark.parametrize("content", [b"", b"[1]", b"models: {", b"\xff\xfe", b"models: {}\nmodels: {}"])
def test_a_file_that_is_no_pool_file_says_why(tmp_path: Path, content: bytes) -> None:
    """Empty, of another shape, broken, not text, a key twice."""
    path = tmp_path / "pool.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"pool\.yaml"):
        read_pool(path)


@given(st.lists(KEYS, min_size=1, max_size=4, unique=True), st.integers())
def test_a_setting_is_found_where_it_was_put(keys: list[str], value: int) -> None:
    """Whatever the path, one lookup per part finds the value, and nothing else was added."""
    mapping: dict[str, object] = {}
    apply_setting(mapping, f"{'.'.join(keys)}={value}")
    at: object = mapping
    for key in keys:
        assert isinstance(at, dict)
        assert list(at) == [key]
        at = at[key]
    assert at == value
