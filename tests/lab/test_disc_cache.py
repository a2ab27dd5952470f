"""Cells on disk: what was run is not run again, what was cut off is passed over, another package begins anew."""

from pathlib import Path

import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.lab import disc_report as source
from loadwise.lab.disc import Cell, CellResult, Settings
from loadwise.lab.disc_cache import CellCache, cell_key, package_digest
from loadwise.lab.disc_report import run_cells

CELL = Cell(world="qwen-gh200", preset="oracle", load=8, seed=1, settings=Settings(n_programs=12, router={"idle_s": 9}))


def result(value: float) -> CellResult:
    """A result that took no time."""
    return CellResult(**dict.fromkeys(CellResult.__struct_fields__, value))


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    """Equal numbers, also those that have no short decimal."""
    CellCache(tmp_path, "a").put(CELL, result(1 / 3))
    again = CellCache(tmp_path, "a")
    assert again.get(CELL) == result(1 / 3)
    assert len(again) == 1
    assert CellCache(tmp_path, "b").get(CELL) is None, "another state of the package"


def test_keys_tell_every_difference() -> None:
    """Equal descriptions have equal keys; any field makes another."""
    changed = [
        Cell(world="qwen-gh200", preset="oracle", load=8, seed=1, settings=Settings(n_programs=13)),
        Cell(world="qwen-gh200", preset="oracle", load=8, seed=2, settings=CELL.settings),
        Cell(world="qwen-gh200", preset="fast", load=8, seed=1, settings=CELL.settings),
        Cell(world="qwen-h200", preset="oracle", load=8, seed=1, settings=CELL.settings),
    ]
    assert len({cell_key(cell) for cell in [CELL, *changed]}) == 5
    same = Cell(
        world="qwen-gh200", preset="oracle", load=8, seed=1, settings=Settings(router={"idle_s": 9}, n_programs=12)
    )
    assert cell_key(same) == cell_key(CELL)


def test_a_world_from_a_file_is_what_stands_in_it(tmp_path: Path) -> None:
    """A file that changes is another world under the same name."""
    file = tmp_path / "mine.yaml"
    cell = Cell(world=str(file), preset="oracle", load=8, seed=1)
    file.write_text("a: 1\n")
    first = cell_key(cell)
    file.write_text("a: 2\n")
    assert cell_key(cell) != first


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    """A run that died in the middle of a line loses that cell alone, and the next one can go on writing."""
    other = Cell(world="qwen-gh200", preset="fast", load=8, seed=1)
    cache = CellCache(tmp_path, "a")
    cache.put(CELL, result(1.0))
    whole = cache.path.read_bytes()
    cache.put(other, result(2.0))
    cache.path.write_bytes(whole + cache.path.read_bytes()[len(whole) :][:40])
    left = CellCache(tmp_path, "a")
    assert (left.get(CELL), left.get(other)) == (result(1.0), None)
    left.put(other, result(2.0))
    assert CellCache(tmp_path, "a").get(other) == result(2.0)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    """With the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cells cannot be kept in '.*file"):
        CellCache(tmp_path / "file", "a")


def test_the_digest_is_that_of_files() -> None:
    """The same twice, sixteen digits."""
    assert package_digest() == package_digest()
    assert len(package_digest()) == 16


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third cell fails; the second run begins with it, and all come back in the order that was asked for."""
    seen: list[int] = []
    fails_at = 3

    def fake(cell: Cell) -> CellResult:
        if cell.seed == fails_at:
            raise KeyboardInterrupt
        seen.append(cell.seed)
        return result(float(cell.seed))

    monkeypatch.setattr(source, "run_cell", fake)
    todo = [Cell(world="qwen-gh200", preset="oracle", load=8, seed=seed) for seed in (1, 2, 3, 4)]
    with pytest.raises(KeyboardInterrupt):
        run_cells(todo, 1, cache=CellCache(tmp_path, "a"))
    fails_at = 0
    ran = run_cells(todo, 1, cache=CellCache(tmp_path, "a"))
    assert seen == [1, 2, 3, 4]
    assert [(one.cell.seed, one.result.resolved) for one in ran] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_after_the_limit_no_cell_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known is reported, the rest left out."""
    monkeypatch.setattr(source, "run_cell", lambda cell: pytest.fail("no time is left"))
    cache = CellCache(tmp_path, "a")
    cache.put(CELL, result(1.0))
    other = Cell(world="qwen-gh200", preset="fast", load=8, seed=1)
    assert [one.cell for one in run_cells([other, CELL], 1, cache=cache, limit_s=0.0)] == [CELL]
