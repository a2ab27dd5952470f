"""Committed lists of task ids: what is read is what was hashed, and what does not fit is refused by name."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_folder import row, write

from loadwise.kernel.errors import ConfigError
from loadwise.lab.stream import AgentChoice, read_stream
from loadwise.lab.task_lists import INDEX, TaskLists, digest, parse_split, parse_tasks, require_listed, task_digest

WORD = st.text(st.characters(exclude_characters="\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", codec="utf-8"), min_size=1)
TASKS = st.lists(st.tuples(WORD, WORD), min_size=1, max_size=8, unique=True)


def put(folder: Path, lines: list[str], *, sha256: str = "", file: str = "a.txt", n: int = -1) -> TaskLists:
    """A folder with one list `a`, and an index that may be wrong about it."""
    text = "\n".join(lines) + "\n"
    data = gzip.compress(text.encode()) if file.endswith(".gz") else text.encode()
    (folder / file).write_bytes(data)
    listed = {"file": file, "n": n if n >= 0 else len(lines), "sha256": sha256 or digest(lines), "about": "a"}
    index = {"lists": {"a": listed}, "splits": {"a.halvings": listed}, "streams": {}}
    (folder / INDEX).write_text(json.dumps(index))
    return TaskLists(folder)


@given(TASKS)
def test_a_list_reads_back_and_its_hash_is_that_of_its_lines(tasks: list[tuple[str, str]]) -> None:
    """Reading what was written gives the same tasks in the same order; the hash is over `family<TAB>id` lines."""
    lines = [f"{family}\t{task_id}" for family, task_id in tasks]
    assert list(parse_tasks("\n".join(lines) + "\n", "here")) == tasks
    assert task_digest(tasks) == hashlib.sha256("\n".join(lines).encode()).hexdigest() == digest(lines)


@given(TASKS, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_halves_of_a_split_are_disjoint_and_cover(tasks: list[tuple[str, str]], n_halvings: int, seed: int) -> None:
    """Every task is in exactly one half of each halving, the one its bit says."""
    bits = np.random.default_rng(seed).integers(0, 2, (len(tasks), n_halvings))
    rows = zip(bits.tolist(), tasks, strict=True)
    lines = [f"{''.join(map(str, row))}\t{family}\t{task_id}" for row, (family, task_id) in rows]
    split = parse_split("\n".join(lines), "here")
    for place in range(n_halvings):
        first, second = split.halves(place)
        assert not set(first) & set(second)
        assert set(first) | set(second) == set(tasks)
        assert second == tuple(task for task, bit in zip(tasks, bits[:, place], strict=True) if bit)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("swe\n", "line 1: 'swe' is not 2 fields"),
        ("swe\ta\nswe\tb\tc\n", "line 2"),
        ("swe\ta\n\nswe\tb\n", "line 2: '' is not 2"),
        ("swe\t\n", "line 1"),
        ("swe\ta\nswe\ta\n", "task 'a' of 'swe' is listed twice"),
    ],
)
def test_a_broken_list_is_refused(text: str, why: str) -> None:
    """The place and what is wrong there are named."""
    with pytest.raises(ConfigError, match=why):
        parse_tasks(text, "list 'x'")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("01\tswe\ta\n1\tswe\tb\n", "line 2: bits '1' are not 2"),
        ("2\tswe\ta\n", "bits '2'"),
        ("\tswe\ta\n", "line 1"),
        ("0\tswe\ta\n1\tswe\ta\n", "listed twice"),
    ],
)
def test_a_broken_split_is_refused(text: str, why: str) -> None:
    """Halves of unequal halvings, other digits and repeated tasks are named."""
    with pytest.raises(ConfigError, match=why):
        parse_split(text, "split 'x'")


@pytest.mark.parametrize("file", ["a.txt", "a.txt.gz"])
def test_a_file_is_held_to_its_hash(tmp_path: Path, file: str) -> None:
    """A list that fits its hash is read, packed or not; one changed task or one missing line is not."""
    lines = ["swe\ta", "swe\tb"]
    assert put(tmp_path, lines, file=file).tasks("a") == (("swe", "a"), ("swe", "b"))
    with pytest.raises(ConfigError, match="the index says 2 of"):
        put(tmp_path, ["swe\ta", "swe\tc"], sha256=digest(lines), file=file).tasks("a")
    with pytest.raises(ConfigError, match="has 2 lines"):
        put(tmp_path, lines, n=3, file=file).tasks("a")


def test_unknown_names_and_damaged_files_are_refused(tmp_path: Path) -> None:
    """No such list, no such file, no gzip, no index: one line each, never a traceback of another kind."""
    lists = put(tmp_path, ["swe\ta"], file="a.txt.gz")
    with pytest.raises(ConfigError, match="list 'b' is unknown; known: a"):
        lists.tasks("a+b")
    with pytest.raises(ConfigError, match="listed twice"):
        lists.tasks("a+a")
    whole = (tmp_path / "a.txt.gz").read_bytes()
    for data in (b"no gzip", whole[:-6], whole[:12] + b"\xff" + whole[13:], gzip.compress(b"\xff\xfe")):
        (tmp_path / "a.txt.gz").write_bytes(data)
        with pytest.raises(ConfigError, match=r"cannot be read|lines of SHA-256"):
            lists.tasks("a")
    (tmp_path / "a.txt.gz").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        lists.tasks("a")
    (tmp_path / INDEX).write_text('{"lists": {}, "splits": {}, "streams": {}, "other": 1}')
    with pytest.raises(ConfigError, match="other"):
        TaskLists(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        TaskLists(tmp_path / "nowhere")


def test_a_list_is_held_to_an_outcomes_folder(tmp_path: Path) -> None:
    """The tasks of a stream are those listed, in that order; a missing, a further and a moved one are named."""
    rows = [row(task, model=model) for task in ("a", "b") for model in ("small", "big")]
    stream = read_stream(write(tmp_path, rows), ["swe"], ["small", "big"], AgentChoice.parse(None))
    assert stream.tasks == (("swe", "a"), ("swe", "b"))
    require_listed(stream.tasks, stream.tasks, "list 'x'")
    with pytest.raises(ConfigError, match="lists task 'c' of 'swe', which has no outcome"):
        require_listed((*stream.tasks, ("swe", "c")), stream.tasks, "list 'x'")
    with pytest.raises(ConfigError, match="task 'b' of 'swe' is not listed"):
        require_listed(stream.tasks[:1], stream.tasks, "list 'x'")
    with pytest.raises(ConfigError, match="another order"):
        require_listed(stream.tasks[::-1], stream.tasks, "list 'x'")
