"""The contracts of `.importlinter` cover every room, and a violation breaks them."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(path.parent.name for path in (ROOT / "src" / "loadwise").glob("*/__init__.py"))
PURE = {"kernel", "ledger", "policy", "verify", "router", "team", "mesh"}
BANNED = {"time", "datetime", "random", "asyncio", "threading", "socket", "os", "io", "logging", "subprocess"}


def contract(name: str, key: str) -> list[str]:
    """One list of one contract."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return parser[f"importlinter:contract:{name}"][key].split("\n")[1:]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the import linter as `make lint` does, on a tree."""
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoiled."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def test_every_pure_room_that_exists_is_held_to_purity() -> None:
    """A pure room cannot be added without its ban list."""
    listed = {name.removeprefix("loadwise.") for name in contract("pure", "source_modules")}
    assert listed == PURE & set(ROOMS)


def test_the_ban_list_holds_what_the_house_rules_ban() -> None:
    """Clock, chance, I/O and HTTP are all on the list."""
    assert set(contract("pure", "forbidden_modules")) >= BANNED | {"http", "urllib", "httptools", "uvloop"}


def test_the_tree_keeps_its_contracts(copy: Path) -> None:
    """The rooms as they stand import downwards only."""
    found = lint(copy)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("kernel/ids.py", "import time", "Pure rooms"),
        ("router/order.py", "import http.client", "Pure rooms"),
        ("policy/fixed.py", "from loadwise.router import order", "Rooms import downwards only"),
        ("ledger/demand.py", "from loadwise.policy import base", "Rooms import downwards only"),
        ("client.py", "from loadwise import settings", "Rooms import downwards only"),
        ("gateway/answers.py", "import torch", "Only train imports torch"),
        ("misc.py", "", "Rooms import downwards only"),
    ],
    ids=["clock", "http", "upwards", "sideways", "client", "torch", "no-place"],
)
def test_a_violation_breaks_its_contract(copy: Path, module: str, line: str, broken: str) -> None:
    """The linter fails, and names the contract, when one import climbs the stair or breaks a ban."""
    with open(copy / "src" / "loadwise" / module, "a") as file:
        file.write(f"\n{line}\n")
    found = lint(copy)
    assert found.returncode != 0
    (verdict,) = [text for text in found.stdout.splitlines() if text.startswith(broken) and "BROKEN" in text]
    assert verdict


def test_torch_is_allowed_in_train(copy: Path) -> None:
    """The one room that may import torch does so without breaking anything."""
    room = copy / "src" / "loadwise" / "train"
    room.mkdir(exist_ok=True)
    (room / "__init__.py").touch()
    (room / "probe_of_the_stair.py").write_text("import torch\n")
    found = lint(copy)
    assert found.returncode == 0, found.stdout + found.stderr
