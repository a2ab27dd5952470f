"""Reading a folder of outcomes: what becomes a task, which agent is taken, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lab_folder import invented, row, write, write_texts

from loadwise.kernel.errors import ConfigError
from loadwise.lab.features import make_contexts
from loadwise.lab.replay import trial_of
from loadwise.lab.stream import AgentChoice, Stream, read_stream


def read(folder: Path, *families: str, models: str = "small,big", agents: str | None = None) -> Stream:
    return read_stream(folder, list(families) or ["swe"], models.split(","), AgentChoice.parse(agents))


def pair(task_id: str, **values: Any) -> list[dict[str, Any]]:
    """A row of each model."""
    return [row(task_id, **{"model": model, **values}) for model in ("small", "big")]


def test_a_task_that_lacks_a_model_or_every_cost_is_dropped_and_counted(tmp_path: Path) -> None:
    """Each dropped task has one reason; a model that is not asked for makes no task whole."""
    rows = [*pair("whole"), row("half"), row("alien", model="other"), *pair("free", cost_usd=None)]
    stream = read(write(tmp_path, rows))
    assert stream.task_ids == ("whole",)
    assert dict(stream.dropped) == {"model_missing": 2, "cost_missing": 1}


def test_trials_are_kept_in_order_and_their_mean_is_scored(tmp_path: Path) -> None:
    """An unknown cost of one trial is the mean of the others."""
    rows = [
        row("t", trial=1, success=0.5, cost_usd=None),
        row("t", trial=0, success=0.0, cost_usd=0.25),
        row("t", trial=2, success=1.0, cost_usd=0.75),
        row("t", model="big", cost_usd=2.0),
    ]
    stream = read(write(tmp_path, rows))
    assert stream.trial_success[0, 0].tolist() == [0.0, 0.5, 1.0]
    assert stream.trial_cost_usd[0, 0].tolist() == [0.25, 0.5, 0.75]
    assert (stream.success[0, 0], stream.cost_usd[0, 0]) == (0.5, 0.5)
    assert stream.n_trials.tolist() == [[3, 1]]
    assert stream.scale_usd == 2.0
    assert [trial_of(stream, 0, 0, draw) for draw in (0.0, 0.34, 0.999999)] == [0, 1, 2]
    assert trial_of(stream, 0, 1, 0.999999) == 0


def test_the_agent_that_covers_most_tasks_is_taken_and_ties_are_alphabetical(tmp_path: Path) -> None:
    """Per family and model; more trials of the same tasks do not count."""
    rows = [*pair("one", agent="zeta"), *pair("one", agent="alpha", trial=0), *pair("two", agent="zeta")]
    rows += [*pair("one", agent="alpha", trial=1), *pair("one", family="chat", agent="zeta")]
    rows += pair("one", family="chat", agent="beta")
    agents = read(write(tmp_path, rows), "swe", "chat").agents
    assert agents == {
        ("swe", "small"): "zeta",
        ("swe", "big"): "zeta",
        ("chat", "small"): "beta",
        ("chat", "big"): "beta",
    }


@pytest.mark.parametrize(
    ("agents", "taken"),
    [
        ("alpha", ["alpha", "alpha"]),
        ("small=alpha", ["alpha", "zeta"]),
        ("swe=alpha", ["alpha", "alpha"]),
        ("swe=alpha,big=zeta", ["alpha", "zeta"]),
        ("alpha,swe/big=zeta", ["alpha", "zeta"]),
    ],
)
def test_the_most_particular_wish_decides_the_agent(tmp_path: Path, agents: str, taken: list[str]) -> None:
    """FAMILY/MODEL before MODEL before FAMILY before a bare agent."""
    rows = [*pair("one", agent="zeta"), *pair("two", agent="zeta"), *pair("one", agent="alpha")]
    stream = read(write(tmp_path, rows), agents=agents)
    assert list(stream.agents.values()) == taken


def test_families_in_the_order_asked_for_tasks_by_id(tmp_path: Path) -> None:
    """The same id in two families is two tasks."""
    folder = write(tmp_path, [*pair("b"), *pair("a"), *pair("a", family="chat")])
    stream = read(folder, "chat", "swe")
    assert stream.task_ids == ("a", "a", "b")
    assert stream.family.tolist() == [0, 1, 1]


def test_files_are_read_as_one_table(tmp_path: Path) -> None:
    """How rows are spread over files does not matter, nor how columns are stored."""
    write(tmp_path, [row("t")], "first")
    path = write(tmp_path, [row("t", model="big")], "second") / "outcomes" / "second.parquet"
    table = pq.read_table(path)
    stored = {"success": table["success"].cast(pa.int64()), "model": table["model"].dictionary_encode()}
    pq.write_table(pa.table({**{name: table[name] for name in table.column_names}, **stored}), path)
    assert read(tmp_path).task_ids == ("t",)


def test_contexts_know_family_domain_and_text(tmp_path: Path) -> None:
    """A bias, a one-hot of the family, one of the domain within it; components only where there is a text."""
    folder = invented(tmp_path, 4)
    plain = make_contexts(read(folder, "swe", "chat"), "hash", 16)
    assert plain.spec.names[:3] == ("bias", "task_type=swe", "task_type=chat")
    assert plain.spec.names[3:] == ("domain=chat/d0", "domain=chat/d1", "domain=swe/d0", "domain=swe/d1")
    assert plain.x[0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    write_texts(folder, {"swe-000": "mend the parser"})
    texted = make_contexts(read(folder, "swe", "chat"), "hash", 16)
    assert texted.x.shape == (8, 7 + 16)
    assert texted.n_embedded == 1
    assert np.linalg.norm(texted.x[0, 7:]) == pytest.approx(1.0)
    assert not texted.x[1:, 7:].any()


@pytest.mark.parametrize(
    ("columns", "n_embedded"), [(["task_id", "text"], 1), (["task_id"], 0), (["task_id", "family"], 0)]
)
def test_texts_may_lack_what_they_can_do_without(tmp_path: Path, columns: list[str], n_embedded: int) -> None:
    """Without a family a text is joined by its task alone; without texts there is no embedding."""
    folder = write(tmp_path, pair("t"))
    write_texts(folder, {"t": "mend it", "elsewhere": "no task of this stream"})
    path = folder / "tasks" / "some.parquet"
    pq.write_table(pq.read_table(path).select(columns), path)
    assert make_contexts(read(folder), "hash", 16).n_embedded == n_embedded


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    """Numbers are no texts; a file of texts without ids belongs to nothing."""
    folder = write(tmp_path, pair("t"))
    (folder / "tasks").mkdir()
    for columns, said in (({"task_id": ["t"], "text": [1]}, "'text' is of type int64"), ({"text": ["t"]}, "'task_id'")):
        pq.write_table(pa.table(columns), folder / "tasks" / "some.parquet")
        with pytest.raises(ConfigError, match=said):
            read(folder)


def spoil(folder: Path, column: str, values: pa.Array | None) -> Path:
    """Replace a column of the one file, or take it out."""
    path = folder / "outcomes" / "some.parquet"
    table = pq.read_table(path)
    columns = {name: table[name] for name in table.column_names if name != column}
    pq.write_table(pa.table(columns if values is None else {**columns, column: values}), path)
    return folder


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("model", None, "lacks column 'model'"),
        ("cost_usd", pa.array(["0.1", "0.2"]), "'cost_usd' is of type string; it must be a number"),
        ("success", pa.array([[1.0], [0.0]]), "'success' is of type list"),
        ("task_id", pa.array([1, 2]), "'task_id' is of type int64; it must be a string"),
        ("trial", pa.array([0.0, 0.5]), "'trial' is of type double; it must be an integer"),
        ("cost_usd", pa.array([0.1, float("nan")]), "cost_usd is nan"),
        ("cost_usd", pa.array([0.1, float("inf")]), "cost_usd is inf"),
        ("cost_usd", pa.array([-0.5, 0.1]), "cost_usd is -0.5"),
        ("cost_usd", pa.nulls(2), "1 a cost"),
        ("success", pa.array([1.5, 0.0]), "success is 1.5"),
        ("success", pa.array([None, 0.0], pa.float32()), "success is nan"),
        ("trial", pa.array([-1, 0], pa.int16()), "trial must be >= 0"),
        ("agent", pa.array([None, "a"]), "'agent' has 1 nulls; it may have none"),
        ("model", pa.array(["small", None]), "'model' has 1 nulls"),
        ("trial", pa.array([None, 0], pa.int16()), "'trial' has 1 nulls"),
        ("cost_usd", pa.array([1e10, 1.0]), "cost_usd is 10000000000.0; it must be in [0, 1e+09]"),
        ("model", pa.array(["small", "small"]), "model 'big' has no outcome in swe; known: small"),
        ("family", pa.array(["a", "b"]), "family 'swe' has no outcome; known: a, b"),
        ("task_id", pa.array(["one", "other"]), "2 lack a model"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, column: str, values: pa.Array | None, said: str) -> None:
    """The message names the file or the run, and the value."""
    folder = spoil(write(tmp_path, pair("t")), column, values)
    with pytest.raises(ConfigError) as refused:
        read(folder)
    assert said in refused.value.message


def test_two_rows_of_one_run_are_refused(tmp_path: Path) -> None:
    """Also where they stand in two files."""
    write(tmp_path, pair("t"), "first")
    with pytest.raises(ConfigError, match="two such rows"):
        read(write(tmp_path, pair("t"), "second"))


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """No folder, no file in it, a file that is no Parquet."""
    with pytest.raises(ConfigError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no outcomes/\*\.parquet"):
        read(tmp_path)
    (tmp_path / "outcomes").mkdir()
    (tmp_path / "outcomes" / "some.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        ("nobody", "agent 'nobody' has no outcome of these models; known: a"),
        ("small=nobody", "agent 'nobody' has no outcome"),
        ("tiny=a", "'tiny' is neither a family nor a model"),
        ("=a", "is not AGENT"),
        ("a,", "is not AGENT"),
        ("small=a,small=a", "once each"),
        ("big=b", "agent 'b' has no outcome of model 'big' in 'swe'; known: a"),
    ],
)
def test_agents_that_do_not_exist_are_refused(tmp_path: Path, agents: str, said: str) -> None:
    """The known ones are listed."""
    folder = write(tmp_path, [*pair("t"), row("t", agent="b")] if agents == "big=b" else pair("t"))
    with pytest.raises(ConfigError) as refused:
        read(folder, agents=agents)
    assert said in refused.value.message
