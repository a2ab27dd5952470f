"""A plot is written whole, or it is said why not."""

import sys
from pathlib import Path

import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.lab.plotting import drawing


def test_without_matplotlib_it_is_said_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with (
        pytest.raises(ConfigError, match=r"needs matplotlib.*loadwise\[lab\]"),
        drawing(str(tmp_path / "a.png"), 1, size_inches=(1, 1)),
    ):
        pytest.fail("the block ran")


def test_a_kind_of_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """By its path, and the figure is closed all the same; another is written."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = str(tmp_path / "a.nothing")
    with pytest.raises(ConfigError, match=r"a\.nothing"), drawing(path, 2, size_inches=(2, 1)) as (_, axes):
        axes[1].plot([0, 1])
    with drawing(str(tmp_path / "a.png"), 1, size_inches=(2, 1)) as (_, axes):
        axes.plot([0, 1])
    assert (tmp_path / "a.png").stat().st_size > 0 and not pyplot.get_fignums()


def test_a_fault_of_the_drawing_is_its_own(tmp_path: Path) -> None:
    """It is not taken for a file that cannot be written, and nothing is."""
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="of the block"), drawing(str(tmp_path / "a.png"), 1, size_inches=(2, 1)):
        raise ValueError("of the block")
    assert not list(tmp_path.iterdir())
