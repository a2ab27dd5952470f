"""`loadwise lab selector` as outside checks call it: accuracy by class over draws, with the gateway's own rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.cli.lab_selector import parse_classes
from loadwise.cli.main import main
from loadwise.kernel.errors import ConfigError
from loadwise.lab.selector import SelectorConfig, make_grams, read_classes
from loadwise.runner.embed import EmbedderSpec, make_embedder
from loadwise.verify.task_types import SelectionSpec, fit
from loadwise.verify.task_types_text import describe

KEYS = {"name", "version", "commit", "machine", "seeds", "config", "values", "ci95", "peers", "checks", "dropped"}
KINDS = {
    "swe": "The function `f{n}` raises ValueError in module_{n}.py. Expected: no error.\n```python\nf({n})\n```",
    "terminal1": "Run ./script{n}.sh in /app and write its output to /app/out{n}.txt, then stop the server.",
    "terminal2": "Install package{n} under /opt, start it on port {n} and save the log to /var/log/{n}.log.",
    "tau2": "You are Anna {n}. You want to return order #W{n} because the shoes are too small. Your zip is {n}.",
}


def write(folder: Path, rows: list[tuple[str, str | None]], name: str = "some") -> Path:
    """Write one file of (family, text)."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "task_id": [str(at) for at in range(len(rows))],
        "family": pa.array([family for family, _ in rows], pa.string()),
        "text": pa.array([text for _, text in rows], pa.string()),
    }
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty texts of each of four families, one text of two of them, and one that is null."""
    rows: list[tuple[str, str | None]] = [
        (family, text.replace("{n}", str(n))) for family, text in KINDS.items() for n in range(100, 130)
    ]
    rows += [("swe", "both"), ("tau2", "both"), ("swe", None), ("swe", KINDS["swe"].replace("{n}", "100"))]
    return write(tmp_path_factory.mktemp("tasks"), rows)


def measure(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> Any:
    """The one object on stdout."""
    capsys.readouterr()
    argv = ["lab", "selector", "--tasks", str(folder), "--embedder", "hash", "--draws", "10", "--json"]
    assert main([*argv, *more]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_the_object_has_every_key_that_was_promised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each class of each set and k with its interval; families of a joint class; what was left out."""
    result = measure(capsys, folder, "--k", "1,5")
    assert set(result) == KEYS
    assert result["config"]["texts_per_class"] == {"swe": 30, "terminal": 60, "tau2": 30}
    assert result["dropped"]["in_two_classes"] == 1
    for k in (1, 5):
        for name in ("swe", "terminal", "tau2", "family.terminal1", "family.terminal2"):
            key = f"all.k{k}.{name}.accuracy"
            low, high = result["ci95"][key]
            assert 0.0 <= low <= result["values"][key] <= high <= 1.0
    assert set(result["values"]) == set(result["ci95"])
    keys = {check["key"] for check in result["checks"]}
    assert keys == {"all.k5.kept_accuracy", "all.k5.coverage"}, "three of three classes are all of them"


def test_kinds_that_differ_are_told_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With five examples nearly every invented text is of its own kind, and what the margin keeps is right."""
    values = measure(capsys, folder, "--k", "1,5")["values"]
    assert values["all.k5.accuracy"] > 0.97
    assert values["all.k5.kept_accuracy"] >= values["all.k5.accuracy"]
    assert values["all.k5.coverage"] >= values["all.k1.coverage"]


def test_labels_without_meaning_are_told_at_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No text is told by having been an example: of one kind under two names half is right."""
    rng = np.random.default_rng(0)
    rows = [("ab"[int(rng.integers(2))], KINDS["tau2"].replace("{n}", str(n))) for n in range(400)]
    values = measure(capsys, write(tmp_path, list(rows)), "--k", "5", "--draws", "40")["values"]
    assert 0.4 < values["all.k5.accuracy"] < 0.6


def test_the_same_seed_gives_the_same_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And another seed another sample."""
    one, same = (measure(capsys, folder, "--k", "1", "--seed", "1")["values"] for _ in range(2))
    assert one == same
    samples = [set(read_classes(SelectorConfig(tasks=str(folder), n_texts=10, seed=seed)).texts) for seed in (1, 2)]
    assert samples[0] != samples[1]


def test_margins_trade_coverage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A margin of zero keeps everything, one of two nothing."""
    everything = measure(capsys, folder, "--k", "5", "--margin", "0")["values"]
    assert everything["all.k5.coverage"] == 1.0
    assert everything["all.k5.kept_accuracy"] == pytest.approx(everything["all.k5.accuracy"])
    nothing = measure(capsys, folder, "--k", "5", "--margin", "2")["values"]
    assert nothing["all.k5.coverage"] == 0.0
    assert "all.k5.kept_accuracy" not in nothing


def test_the_lab_measures_what_the_gateway_runs(folder: Path) -> None:
    """Scores of the lab and the reading of the gateway's embedder agree on every text."""
    config = SelectorConfig(tasks=str(folder), embedder=EmbedderSpec(kind="hash"))
    texts = read_classes(config)
    examples = np.concatenate([np.flatnonzero(texts.owner == at)[:4] for at in range(3)])
    gram = make_grams(texts.texts, config.embedder)["ridge"]
    scores = fit("ridge", gram[np.ix_(examples, examples)], texts.owner[examples], 3).scores(gram[:, examples])
    given_examples = {
        name: [texts.texts[at] for at in examples if texts.owner[at] == index]
        for index, name in enumerate(texts.classes)
    }
    made = make_embedder("hash", 16, given_examples, SelectionSpec())
    assert made is not None
    selector = made._prepared.selector  # type: ignore[attr-defined]
    for at, text in enumerate(texts.texts):
        told = selector.tell(describe(text))
        assert told.nearest == texts.classes[int(scores[at].argmax())]
        best = np.sort(scores[at])
        assert told.margin == pytest.approx(best[-1] - best[-2], abs=1e-4)
    made.close()


def test_halves_are_disjoint_and_whole(folder: Path) -> None:
    """Choices can be made on one half and reported on the other."""
    halves = [set(read_classes(SelectorConfig(tasks=str(folder), half=half)).texts) for half in ("first", "second")]
    everything = set(read_classes(SelectorConfig(tasks=str(folder))).texts)
    assert halves[0] | halves[1] == everything
    assert not halves[0] & halves[1]


def test_classes_may_be_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any families under any names; a folder that holds `tasks/` will do."""
    (folder.parent / "whole").mkdir(exist_ok=True)
    place = folder.parent / "whole" / "tasks"
    if not place.exists():
        place.symlink_to(folder)
    classes = "issue=swe,shell=terminal1+terminal2"
    result = measure(capsys, place.parent, "--k", "1", "--classes", classes)
    assert result["config"]["texts_per_class"] == {"issue": 31, "shell": 60}


def test_families_that_nobody_knows_are_classes_of_their_own(tmp_path: Path) -> None:
    """A folder of other tasks needs no flag; those that repeat another family are left out."""
    rows = [(family, f"{family} {n}") for family in ("legal", "medical", "mmlu") for n in range(5)]
    assert read_classes(SelectorConfig(tasks=str(write(tmp_path, list(rows))))).classes == ("legal", "medical")


def test_k_that_a_class_has_not_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be measured is said, not guessed."""
    result = measure(capsys, folder, "--k", "5,40")
    assert "all.k5.accuracy" in result["values"] and "all.k40.accuracy" not in result["values"]
    with pytest.raises(AssertionError):
        measure(capsys, folder, "--k", "40")
    assert "needs more than 40 texts" in capsys.readouterr().err


def test_tables_are_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a reader and for a terminal."""
    argv = ["lab", "selector", "--tasks", str(folder), "--embedder", "hash", "--draws", "3", "--k", "5"]
    assert main([*argv, "--markdown", str(tmp_path / "t.md")]) == 0
    assert "| ridge, 5 |" in (tmp_path / "t.md").read_text()
    out = capsys.readouterr().out
    assert "terminal1" in out and "all.k5.coverage" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tasks", "/no/such"], "does not exist"),
        (["--k", "x"], "must be whole numbers"),
        (["--k", "0"], "different numbers in"),
        (["--draws", "1"], "must be in"),
        (["--half", "third"], "first, second or all"),
        (["--margin", "-1"], "must be in"),
        (["--embedder", "bge"], "unknown"),
        (["--embedder", "openai"], "needs an http"),
        (["--classes", "swe"], "name one class"),
        (["--classes", "swe,nobody"], "known: swe, tau2"),
        (["--markdown", "/no/such/t.md"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    """Status 2 and the reason."""
    argv = ["lab", "selector", "--tasks", str(folder), "--embedder", "hash", "--draws", "3", *more]
    assert main(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error


def test_a_folder_that_fits_no_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file, no column, no Parquet, one class."""
    argv = ["lab", "selector", "--tasks", str(tmp_path), "--embedder", "hash"]
    assert main(argv) == 2
    assert "has no *.parquet" in capsys.readouterr().err
    (tmp_path / "a.parquet").write_text("no")
    assert main(argv) == 2
    assert "cannot be read as Parquet" in capsys.readouterr().err
    pq.write_table(pa.table({"family": ["x"]}), tmp_path / "a.parquet")
    assert main(argv) == 2
    assert "lacks column 'text'" in capsys.readouterr().err
    write(tmp_path, [("x", "1"), ("x", "2"), ("y", "3")], "a")
    assert main(argv) == 2
    assert "classes with two texts: 1; it takes two" in capsys.readouterr().err


@given(st.text("ab=+, ", max_size=12))
def test_classes_parse_or_are_refused(text: str) -> None:
    """Whatever is said, every family is in one class, or it is an error."""
    try:
        classes = parse_classes(text)
    except ConfigError:
        return
    families = [family for of in classes.values() for family in of]
    assert len(classes) >= 2 and len(set(families)) == len(families) and "" not in families
