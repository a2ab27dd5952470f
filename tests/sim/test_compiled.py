"""Machine code that is kept on disk is that of the sources as they are."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from loadwise.sim import compiled, hybrid_core
from loadwise.sim.compiled import HAS_NUMBA, MODULES, sources_stamp

SIM = Path(compiled.__file__).parent


@pytest.mark.parametrize(
    "name", ["hybrid_core.py", "hybrid_held.py", "hybrid_pool.py", "hybrid_state.py", "fast_state.py"]
)
def test_any_module_that_is_compiled_in_makes_code_stale(name: str, tmp_path: Path) -> None:
    """One other byte in any of them gives another stamp; the same bytes elsewhere give the same."""
    for folder in ("same", "other"):
        shutil.copytree(SIM, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "other" / name
    changed.write_text(changed.read_text() + "\n")
    assert sources_stamp(tmp_path / "same") == sources_stamp(SIM) != sources_stamp(tmp_path / "other")


def test_no_module_that_is_compiled_is_forgotten() -> None:
    """Whatever holds a compiled function is under the stamp."""
    known = {path.name for pattern in MODULES for path in SIM.glob(pattern)}
    holding = {path.name for path in SIM.glob("*.py") if "\n@compil" in path.read_text()}
    assert holding and holding <= known


@pytest.mark.skipif(not HAS_NUMBA, reason="the extra `sim` (numba) is not installed")
def test_the_kept_code_bears_the_stamp() -> None:
    """Numba finds nothing on disk that was made of other sources."""
    made: Any = hybrid_core.fast_tell
    assert made._cache._cache_file._source_stamp == sources_stamp(SIM)
