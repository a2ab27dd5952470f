"""What `import loadwise` gives and what it costs."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import loadwise
from loadwise.kernel.fact import Fact

HEAVY = {
    "torch",
    "numba",
    "numpy",
    "httptools",
    "uvloop",
    "openai",
    "aiohttp",
    "httpx",
    "requests",
    "onnxruntime",
    "tokenizers",
    "rich",
    "asyncio",
    "http",
    "urllib.request",
}


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return set(json.loads(found.stdout))


def test_all_is_sorted_and_every_name_exists() -> None:
    """`__all__` promises nothing that is not there."""
    assert loadwise.__all__ == sorted(loadwise.__all__)
    assert len(loadwise.__all__) == len(set(loadwise.__all__)) <= 30
    for name in loadwise.__all__:
        assert getattr(loadwise, name) is not None, name


def test_names_that_are_not_there_are_attribute_errors() -> None:
    """Lazy loading does not turn a typo into something else."""
    with pytest.raises(AttributeError, match="opne_stack"):
        loadwise.opne_stack  # noqa: B018


@pytest.mark.parametrize("name", ["events", "commands"])
def test_the_vocabulary_is_whole_as_attribute_and_as_module(name: str) -> None:
    """`loadwise.events` and `loadwise.commands` can be imported, and hold each of the kernel's facts itself."""
    module = importlib.import_module(f"loadwise.{name}")
    assert getattr(loadwise, name) is module
    kernel = importlib.import_module(f"loadwise.kernel.{name}")
    spoken = {kind.__name__ for kind in getattr(kernel, {"events": "Event", "commands": "Command"}[name]).__args__}
    assert spoken <= set(module.__all__)
    for exported in module.__all__:
        assert getattr(module, exported) is getattr(kernel, exported)


def test_import_loads_nothing_heavy() -> None:
    """`import loadwise` loads no web library, no numeric library and no model runtime."""
    assert not HEAVY & loaded_after("import loadwise")


def test_the_client_helper_loads_nothing_heavy() -> None:
    """`loadwise.program` does not import the SDK it works with."""
    assert not HEAVY & loaded_after("import loadwise; loadwise.program")


def test_open_stack_loads_no_web_library() -> None:
    """A stack can be run where no web library is wanted."""
    web = {"httptools", "uvloop", "openai", "aiohttp", "httpx", "requests", "torch", "numba"}
    assert not web & loaded_after("import loadwise; loadwise.open_stack")


def test_the_version_is_the_packages() -> None:
    """`__version__` and the package metadata agree."""
    from importlib.metadata import version

    assert loadwise.__version__ == version("loadwise")


def modules() -> list[str]:
    """Every module that needs nothing of an extra."""
    found = pkgutil.walk_packages(loadwise.__path__, "loadwise.")
    return [
        info.name for info in found if not info.name.startswith("loadwise.train") and not info.name.endswith("__main__")
    ]


def load(name: str) -> ModuleType | None:
    """The module, or None where it belongs to an extra that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("loadwise"):
            raise
        return None


def facts(kind: type[Fact]) -> set[type[Fact]]:
    """All subclasses, at any depth."""
    below = set(kind.__subclasses__())
    return below.union(*(facts(sub) for sub in below)) if below else below


def test_every_fact_is_frozen_and_strict() -> None:
    """What crosses a border between rooms cannot be changed on the other side."""
    loaded = [load(name) for name in modules()]
    assert sum(module is not None for module in loaded) > 30
    found = facts(Fact)
    assert len(found) > 30
    for kind in found:
        config = kind.__struct_config__
        assert config.frozen, f"{kind.__module__}.{kind.__qualname__} is not frozen"
        assert config.forbid_unknown_fields, f"{kind.__module__}.{kind.__qualname__} takes unknown fields"


def test_every_module_says_which_names_it_exports_truthfully() -> None:
    """A module that has `__all__` has every name in it."""
    for name in modules():
        module = load(name)
        for exported in getattr(module, "__all__", ()):
            assert hasattr(module, exported), f"{name}.__all__ names {exported!r}"
