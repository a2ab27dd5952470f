"""Write the committed lists of task ids (`experiments/ids`) from a folder of outcomes, and hold results to them.

    python -m experiments.make_ids --data DIR          write every list and split, and the index
    python -m experiments.make_ids --check             compare hashes that results recorded with those of the lists

Which list is whose: `IDS` of each script. What a script does with halves is drawn from the seed and the sizes of
families alone, so the splits can be written, and checked, without running anything.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from experiments.cells import CRB_MODELS, DATA, IDS_FOLDER, PAIRS, RESULTS, with_tau2
from loadwise.kernel.streams import Streams
from loadwise.lab.judge import N_SPLITS, halving
from loadwise.lab.selector import SelectorConfig, read_classes
from loadwise.lab.stream import AgentChoice, read_stream
from loadwise.lab.task_lists import INDEX, Index, Listed, Task, TaskLists, digest, task_digest

STREAMS = (
    "swe+terminal2",
    "crb",
    "tau2_constructed+swe+terminal2",
    "tau2_constructed+swe",
    "swe",
    "terminal2",
    "tau2_constructed",
    "swe_mixed+terminal2+bfcl_mixed",
)
"""Streams whose cost weights are chosen on halves of the tasks."""


def halvings(tasks: Sequence[Task], seed: int = 0) -> np.ndarray:
    """What every replay of these tasks draws to choose cost weights (and settings), shape (n_tasks, N_SPLITS)."""
    families = list(dict.fromkeys(family for family, _ in tasks))
    family = np.array([families.index(name) for name, _ in tasks], dtype=np.int64)
    rng = Streams(seed).at("bootstrap", 0)
    return np.stack([halving(family, rng) for _ in range(N_SPLITS)], axis=1)


def threshold_half(n_tasks: int, seed: int = 0) -> np.ndarray:
    """What the strong/weak threshold is fitted on for the other half, shape (n_tasks, 1)."""
    return (Streams(seed).at("halves", 0).permutation(n_tasks) % 2 == 0)[:, None]


def make_lists(data: Path) -> Iterator[tuple[str, str, list[Task]]]:
    """Name, what it is, and tasks of every list, in the order of its stream."""
    from experiments import cold_packs, escalation, slots
    from experiments.demo_success_table import read

    agents = AgentChoice.parse(None)
    pair = read_stream(data, ["swe", "terminal2"], list(PAIRS[0]), agents).tasks
    for family, about in (("swe", "SWE-bench Verified"), ("terminal2", "Terminal-Bench 2.0")):
        tasks = [task for task in pair if task[0] == family]
        yield family, f"{about}: tasks that both models of every pair have run", tasks
    crb = read_stream(data, ["crb"], CRB_MODELS, agents).tasks
    yield "crb", "CodeRouterBench: tasks with a cost of all eight models", list(crb)
    with with_tau2(data, PAIRS[0], "independent") as folder:
        tau2 = read_stream(folder, ["tau2"], list(PAIRS[0]), agents).tasks
    yield "tau2_constructed", "constructed from published margins of tau2-bench, under any coupling", list(tau2)
    with escalation.mixed_folder(data) as folder:
        mixed = read_stream(folder, list(escalation.MIXED), ["small", "large"], agents).tasks
    for family in ("swe", "bfcl"):
        about = f"the first {escalation.MIXED_TASKS} tasks of {family} by hash, for the mixed stream"
        yield f"{family}_mixed", about, [one for one in mixed if one[0] == family]
    for sample in slots.SAMPLES:
        for n_copies in slots.N_COPIES:
            with slots.drawn(data, sample, n_copies, PAIRS[0]) as folder:
                tasks = read_stream(folder, ["swe"], list(PAIRS[0]), agents).tasks
            about = f"{slots.N_TASKS} tasks of swe drawn with seed {sample}, {n_copies} times under names of their own"
            yield f"slots_{sample}_{n_copies * slots.N_TASKS}", about, list(tasks)
    packs = cold_packs.halves(sorted(pair))
    for place, half in enumerate(packs):
        about = (
            f"half {place} of swe and terminal2: what pack {place} is fitted on; its tasks are scored with the other"
        )
        yield f"pack_{place}", about, sorted(half)
    sample = Streams(0).at("sample", 0).permutation(len(pair))[:100]
    yield "orchestrator_probed", "what a warm orchestrator has seen", [pair[at] for at in sample[:30]]
    yield "orchestrator_scored", "what the orchestrator is scored on", [pair[at] for at in sample[30:]]
    questions = sorted({row["task_id"] for row in read(data / "outcomes" / "mmlu_pro.parquet")})
    yield "mmlu_pro", "every MMLU-Pro question", [("mmlu_pro", one) for one in questions]
    for half, n_texts in (("all", 600), ("first", 300), ("second", 300)):
        texts = read_classes(SelectorConfig(tasks=str(data / "tasks"), half=half, n_texts=n_texts))
        about = f"texts of `lab selector`, half {half}, at most {n_texts} of a class, by hash of the text"
        yield f"selector_{half}", about, list(texts.marks)


def write(data: Path) -> None:
    """Every file and the index."""
    IDS_FOLDER.mkdir(exist_ok=True)
    lists, tasks_by_name = {}, {}
    for name, about, tasks in make_lists(data):
        tasks_by_name[name] = tasks
        lists[name] = put(name, about, [f"{family}\t{task_id}" for family, task_id in tasks])
    splits, streams = {}, {}
    for stream in STREAMS:
        tasks = [task for part in stream.split("+") for task in tasks_by_name[part]]
        streams[stream] = task_digest(tasks)
        about = f"of {stream}: {N_SPLITS} halvings; cost weights and settings of each half are chosen on the other"
        splits[f"{stream}.halvings"] = put(f"{stream}.halvings", about, bits(halvings(tasks), tasks))
        if stream in ("swe+terminal2", "crb"):
            about = f"of {stream}: the strong/weak threshold of each half is fitted on the other"
            name = f"{stream}.threshold"
            splits[name] = put(name, about, bits(threshold_half(len(tasks)), tasks))
    index = Index(lists=lists, splits=splits, streams=streams)
    (IDS_FOLDER / INDEX).write_text(json.dumps(msgspec.to_builtins(index), indent=1) + "\n")


def bits(is_second: np.ndarray, tasks: Sequence[Task]) -> list[str]:
    """Lines of a split."""
    rows = zip(is_second.astype(int).tolist(), tasks, strict=True)
    return [f"{''.join(map(str, row))}\t{family}\t{task_id}" for row, (family, task_id) in rows]


def put(name: str, about: str, lines: Sequence[str]) -> Listed:
    """Write one file, packed where it is long; what the index says of it."""
    text = "\n".join(lines) + "\n"
    file = f"{name}.txt"
    if len(text) > 40_000:
        file = f"{name}.txt.gz"
        (IDS_FOLDER / file).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    else:
        (IDS_FOLDER / file).write_text(text)
    return Listed(file=file, n=len(lines), sha256=digest(lines), about=about)


def recorded_hashes() -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Script, cell, recorded hash (empty where none was) and cell, of every result that is a list of cells."""
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem.startswith("disc_"):
            continue  # of `lab disc`: a simulated world, whose programs are drawn by seed
        found = json.loads(path.read_text())
        for cell in found if isinstance(found, list) else [found]:
            told = cell.get("task_ids_sha256") or recorded_hash(cell)
            yield path.stem, cell.get("cell", path.stem), told, cell


def recorded_hash(cell: Mapping[str, Any]) -> str:
    """The hash of its tasks that a run recorded in its configuration; empty where it recorded none."""
    config = cell.get("config", {})
    return str(config.get("task_ids_sha256") or config.get("text_ids_sha256") or "")


def check() -> int:
    """How many results name no list, or another than the one whose hash they recorded; says which."""
    lists, wrong = TaskLists(IDS_FOLDER), 0
    for script, name, told, cell in recorded_hashes():
        ids = cell.get("ids")
        if ids is None:
            print(f"{script}, {name}: names no list")
            wrong += 1
        elif ids.get("named_later") and not told:
            print(f"{script}, {name}: had recorded no hash when it ran; {ids['list']} was named later")
        elif ids["list"] is not None and not lists.sha256(ids["list"]) == ids["sha256"] == told:
            print(f"{script}, {name}: does not fit {ids['list']}")
            wrong += 1
    return wrong


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        raise SystemExit(1 if check() else 0)
    write(arguments.data)


if __name__ == "__main__":
    main()
