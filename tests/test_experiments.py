"""What is recorded of experiments: which tasks, which half chose, which seed and commit, and that all of it fits."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import make_ids
from experiments.cells import CRB_MODELS, DATA, IDS_FOLDER, PAIRS, RESULTS
from loadwise.lab.stream import AgentChoice, read_stream
from loadwise.lab.task_lists import TaskLists, require_listed, task_digest

LISTS = TaskLists(IDS_FOLDER)
NO_SCRIPTS = ("__init__", "cells", "make_ids")
SCRIPTS = sorted(path.stem for path in Path(make_ids.__file__).parent.glob("*.py") if path.stem not in NO_SCRIPTS)
RESULT_OF = {"compare_selectors": "selectors"}
"""Results that are not named as their script."""
SCRIPT_OF = {told: script for script, told in RESULT_OF.items()}


def cells() -> list[tuple[str, dict[str, Any]]]:
    """Every recorded cell with the name of its result."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        if SCRIPT_OF.get(path.stem, path.stem) in SCRIPTS:  # others are of commands, which draw their programs by seed
            told = json.loads(path.read_text())
            found += [(path.stem, cell) for cell in (told if isinstance(told, list) else [told])]
    return found


@pytest.mark.parametrize("name", sorted(LISTS.index.lists))
def test_each_list_fits_its_hash(name: str) -> None:
    """The file's lines are those that the index hashed, each task once."""
    tasks = LISTS.tasks(name)
    assert task_digest(tasks) == LISTS.index.lists[name].sha256
    assert len(set(tasks)) == len(tasks) == LISTS.index.lists[name].n


@pytest.mark.parametrize("name", sorted(LISTS.index.streams))
def test_each_stream_is_its_lists_in_order(name: str) -> None:
    """The hash of a stream is that of its lists joined."""
    assert LISTS.sha256(name) == LISTS.index.streams[name]


@pytest.mark.parametrize("name", sorted(LISTS.index.splits))
def test_halves_are_disjoint_cover_their_stream_and_are_what_a_run_draws(name: str) -> None:
    """Settings-half and scoring-half share no task, are all of the stream, and come from seed 0 as a replay's do."""
    stream, _, kind = name.partition(".")
    split, tasks = LISTS.split(name), LISTS.tasks(stream)
    assert split.tasks == tasks
    drawn = make_ids.halvings(tasks) if kind == "halvings" else make_ids.threshold_half(len(tasks))
    assert np.array_equal(split.is_second, drawn)
    for place in range(split.is_second.shape[1]):
        first, second = split.halves(place)
        assert not set(first) & set(second)
        assert set(first) | set(second) == set(tasks)
        assert abs(len(first) - len(second)) <= len({family for family, _ in tasks})


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (("pack_0", "pack_1"), "swe+terminal2"),
        (("orchestrator_probed", "orchestrator_scored"), None),
        (("selector_first", "selector_second"), None),
    ],
)
def test_what_is_learned_from_and_what_is_scored_share_no_task(parts: tuple[str, str], whole: str | None) -> None:
    """Train and test lists are disjoint; halves of a stream are all of it."""
    one, other = (set(LISTS.tasks(part)) for part in parts)
    assert not one & other
    if whole is not None:
        assert one | other == set(LISTS.tasks(whole))


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_experiment_names_its_lists(script: str) -> None:
    """`IDS` holds committed lists or streams of them; it is empty only where the script reads no outcomes."""
    module = importlib.import_module(f"experiments.{script}")
    named = getattr(module, "IDS", ())
    for name in named:
        LISTS.sha256(name)
    reads = re.search(r"arguments\.data|OUTCOMES_DIR", Path(str(module.__file__)).read_text())
    assert bool(named) == bool(reads)


@pytest.mark.parametrize("result", sorted({name for name, _ in cells()}))
def test_each_result_records_list_hash_seed_and_commit(result: str) -> None:
    """Every cell's tasks are those of a list that its script names; simulated worlds say that they have none."""
    named = importlib.import_module(f"experiments.{SCRIPT_OF.get(result, result)}").IDS
    for where, cell in ((name, cell) for name, cell in cells() if name == result):
        ids = cell["ids"]
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", cell["commit"]), where
        assert "seeds" in cell or "seed" in cell or "n_seeds" in cell
        if not named:
            assert ids["list"] is None
            assert ids["why"]
            continue
        assert ids["list"] in named
        assert ids["sha256"] == LISTS.sha256(ids["list"])
        told = cell.get("task_ids_sha256") or make_ids.recorded_hash(cell)
        assert told == ids["sha256"] or (not told and ids["named_later"])
        if "halvings_sha256" in ids:
            assert ids["halvings_sha256"] == LISTS.index.splits[f"{ids['list']}.halvings"].sha256


@pytest.mark.skipif(not DATA.is_dir(), reason="no measured outcomes beside the repository")
def test_lists_are_the_tasks_of_the_outcomes() -> None:
    """Where the outcomes are, a replay's stream is the committed list, task by task."""
    agents = AgentChoice.parse(None)
    streams = [("swe+terminal2", ["swe", "terminal2"], list(pair)) for pair in PAIRS] + [("crb", ["crb"], CRB_MODELS)]
    for name, families, models in streams:
        require_listed(LISTS.tasks(name), read_stream(DATA, families, models, agents).tasks, f"list {name!r}")


@pytest.mark.skipif(not DATA.is_dir(), reason="no measured outcomes beside the repository")
def test_the_orchestrators_tasks_are_listed() -> None:
    """What `lab orchestrator` probes and scores with its defaults and seed 0 are the committed lists."""
    from loadwise.lab.orchestrated import OrchestratorConfig, run_orchestrator

    config = OrchestratorConfig(
        outcomes=str(DATA),
        families=("swe", "terminal2"),
        models=PAIRS[0],
        cost_weights_per_usd=(0.1,),
        verifications=("adaptive",),
    )
    compared = run_orchestrator(config, lambda prompt: PAIRS[0][0])
    assert compared.probed_ids_sha256 == LISTS.sha256("orchestrator_probed")
    assert compared.scored_ids_sha256 == LISTS.sha256("orchestrator_scored")
