"""`loadwise lab replay` as outside checks call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab_folder import PRICE, SUCCESS, invented, row, write

from loadwise.cli.main import main
from loadwise.lab.offline import OFFLINE
from loadwise.policy.registry import policy_names

KEYS = {"name", "version", "commit", "machine", "seeds", "config", "values", "ci95", "peers", "checks"}
POINT = {"policy", "verification", "cost_weight", "cost_usd", "success", "hull_gain_pp", "ci95", "share"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families of 30 tasks."""
    return invented(tmp_path_factory.mktemp("lab"))


def argv(folder: Path, *more: str) -> list[str]:
    stream = ["--outcomes", str(folder), "--stream", "swe,chat", "--models", "small,big"]
    return ["lab", "replay", *stream, "--draws", "200", *more]


def replay(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> Any:
    """The one object on stdout."""
    capsys.readouterr()
    assert main(argv(folder, "--json", *more)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def points(result: Any, policy: str, verification: str = "adaptive") -> list[Any]:
    return [one for one in result["points"] if one["policy"] == policy and one["verification"] == verification]


def test_the_object_has_every_key_that_was_promised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Points, single models, counts; all policies where none are named; every figure with its interval."""
    result = replay(capsys, folder, "--orders", "1", "--passes", "1", "--cost-weights", "0,1")
    assert set(result) == KEYS | {"points", "singles", "n_tasks", "dropped"}
    assert result["n_tasks"] == 60
    assert result["dropped"] == {"model_missing": 0, "cost_missing": 0}
    assert set(result["singles"]) == {"small", "big"}
    names = {one["policy"] for one in result["points"]}
    assert names == {*policy_names(), *OFFLINE, "loadwise", "per_task_best", "fixed:small", "fixed:big"} - {"fixed"}
    assert all(set(one) >= POINT for one in result["points"])
    assert set(result["values"]) == set(result["ci95"])
    assert result["config"]["agent"] == {f"{family}/{model}": "a" for family in SUCCESS for model in PRICE}
    assert result["seeds"] == [0]


def test_single_models_and_their_mix_gain_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Always the same model is its own single; knowing everything gains more than any policy."""
    result = replay(capsys, folder, "--passes", "2", "--orders", "3", "--policies", "fixed,linucb,random")
    for model, single in result["singles"].items():
        (point,) = points(result, f"fixed:{model}")
        assert point["success"] == pytest.approx(single["success"])
        assert point["cost_usd"] == pytest.approx(single["cost_usd"])
        assert point["hull_gain_pp"] <= 0.0
        assert point["share"][model] == 1.0
    assert points(result, "fixed:small")[0]["hull_gain_pp"] == 0.0  # the cheapest is always on the hull
    (best,) = points(result, "per_task_best")
    assert all(one["success"] <= best["success"] + 1e-9 for one in result["points"])
    assert all(one["hull_gain_pp"] < best["hull_gain_pp"] for one in points(result, "linucb"))


def test_a_learner_finds_what_each_family_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a verifier that reads both families it sends each where it succeeds; a dear model is used less."""
    result = replay(capsys, folder, "--policies", "linucb", "--orders", "5", "--verification", "best")
    found = points(result, "linucb", "best")
    assert [one["cost_weight"] for one in found] == [0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    assert found[0]["success"] > 0.7
    assert found[0]["hull_gain_pp"] > 10.0
    assert found[0]["share"]["big"] > found[-1]["share"]["big"]
    assert result["values"]["linucb.best.over_hull_cross_fitted_pp"] > 5.0


def test_one_verifier_for_all_teaches_nothing_of_the_other_family(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the family that it cannot read it leaves the learner as it was; adaptive verification is better, paired."""
    arms = ["--policies", "linucb", "--orders", "5", "--verification", "adaptive,single", "--misclassified", "0"]
    result = replay(capsys, folder, *arms)
    adaptive, single = points(result, "linucb")[0], points(result, "linucb", "single")[0]
    assert adaptive["family_success"]["chat"] > single["family_success"]["chat"] + 0.1
    assert adaptive["family_success"]["swe"] == pytest.approx(single["family_success"]["swe"], abs=0.1)
    assert "linucb.adaptive_over_single_at_matched_cost_pp" in result["values"]
    exact = replay(capsys, folder, "--policies", "linucb", "--orders", "5", "--verification", "best")
    same = [one["success"] for one in points(exact, "linucb", "best")]
    assert [one["success"] for one in points(result, "linucb")] == pytest.approx(same)


def test_equal_seeds_give_equal_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All chance comes from the seed."""
    more = ["--policies", "lints,epsilon_greedy,loadwise", "--orders", "2", "--passes", "2", "--loss", "0.1"]
    first, second = (replay(capsys, folder, *more) for _ in range(2))
    assert first == second
    assert replay(capsys, folder, *more, "--seed", "1")["points"] != first["points"]


def test_without_a_compiler_the_result_is_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policies themselves do what their compiled forms do."""
    more = ["--orders", "4", "--passes", "3", "--policies", "linucb,lints,knn,table,acrouter,epsilon_greedy,pacer"]
    more += ["--concurrency", "delayed", "--in-flight", "8"]
    monkeypatch.setattr("loadwise.lab.experiment._COMPILE_FROM", 0)
    compiled = replay(capsys, folder, *more)
    monkeypatch.setattr("loadwise.lab.experiment.is_compilable", lambda: False)
    assert replay(capsys, folder, *more) == compiled


def test_the_smallest_stream_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One task, two models that cost nothing: no division by zero anywhere."""
    folder = write(tmp_path, [row("t", model=model, cost_usd=0.0) for model in ("small", "big")])
    capsys.readouterr()
    stream = ["--stream", "swe", "--models", "big,small", "--json", "--orders", "2"]
    assert main(["lab", "replay", "--outcomes", str(folder), *stream]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["n_tasks"] == 1
    assert all(one["hull_gain_pp"] == 0.0 for one in result["points"])


@pytest.mark.parametrize("arm", [["--delay", "30"], ["--concurrency", "batch", "--in-flight", "30"]])
def test_late_verdicts_are_worth_less(folder: Path, arm: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One pass over sixty tasks with half of them in the dark is worse than hearing each at once."""
    once = ["--passes", "1", "--orders", "20", "--policies", "linucb", "--cost-weights", "0"]
    late = points(replay(capsys, folder, *once, *arm), "linucb")[0]["success"]
    assert late < points(replay(capsys, folder, *once), "linucb")[0]["success"]


def test_files_are_written_where_asked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables and a picture; the terminal shows the points."""
    table, picture = tmp_path / "replay.md", tmp_path / "replay.svg"
    more = ["--policies", "linucb,random", "--orders", "1", "--passes", "1"]
    assert main(argv(folder, *more, "--markdown", str(table), "--plot", str(picture))) == 0
    assert "linucb.adaptive.over_hull_at_midpoint_pp" in capsys.readouterr().out
    assert "| linucb | adaptive | 0.25 |" in table.read_text()
    assert "random mixing" in picture.read_text()


def test_a_task_without_some_model_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts say why."""
    rows = [row(f"t{i}", model=model) for i in range(3) for model in ("small", "big")]
    folder = write(tmp_path, [*rows, row("odd"), row("free", cost_usd=None), row("free", model="big")])
    capsys.readouterr()
    stream = ["--stream", "swe", "--models", "big,small", "--policies", "random", "--json"]
    assert main(["lab", "replay", "--outcomes", str(folder), *stream]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["n_tasks"], result["dropped"]) == (3, {"model_missing": 1, "cost_missing": 1})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--stream", "swe,nope"], "family 'nope' has no outcome; known: chat, swe"),
        (["--models", "small,nope"], "model 'nope' has no outcome in swe, chat; known: big, small"),
        (["--models", "small"], "at least 2"),
        (["--models", "small,small"], "each may be given once"),
        (["--models", "small,"], "none may be empty"),
        (["--stream", "swe,swe"], "each may be given once"),
        (["--policies", "linucbb"], "policy 'linucbb' is unknown; known: acrouter, drift, epsilon_greedy"),
        (["--policies", "fixed:nope"], "model 'nope' is not among small, big"),
        (["--policies", "linucb,linucb"], "each may be given once"),
        (["--policies", "fixed,fixed:small"], "'fixed:small' is asked for twice"),
        (["--policies", "no.such:Thing"], "cannot be loaded"),
        (["--policies", "linucb?alfa=1"], "no option 'alfa'"),
        (["--policies", "tiers?alpha=1"], "selector 'tiers' has no options"),
        (["--policies", "linucb?alpha"], "not, once each, KEY=VALUE"),
        (["--policies", "linucb?alpha=x"], "policy 'linucb'"),
        (["--verification", "sometimes"], "known: adaptive, single, best"),
        (["--passes", "0"], "passes is 0"),
        (["--orders", "-1"], "orders is -1"),
        (["--orders", "x"], "invalid int value: 'x'"),
        (["--delay", "-3"], "delay is -3"),
        (["--cost-weights", "a"], "numbers separated by commas"),
        (["--cost-weights", "nan"], "cost weight nan"),
        (["--cost-weights", "1e6"], "the limit of a reward is 1e+06"),
        (["--markdown", "/"], "'/' cannot be written: it is a folder"),
        (["--plot", "picture.gif"], "must end in one of .png, .svg, .pdf"),
        (["--embedder", "nope"], "embedder 'nope' is unknown"),
        (["--outcomes", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["--markdown", "/no/such/folder/x.md"], "cannot be written"),
        (["--orders", "100000", "--passes", "1000"], "the limit is"),
        (["--pass", "3"], "--pass"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_two(
    folder: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout, no traceback, and the known names where one is unknown."""
    capsys.readouterr()
    assert main(argv(folder, *more)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert said in line


def test_the_sample_of_the_format_replays(capsys: pytest.CaptureFixture[str]) -> None:
    """What the documentation shows is what the command reads."""
    sample = Path(__file__).parents[2] / "docs" / "formats" / "outcomes-sample"
    result = replay(capsys, sample, "--policies", "linucb", "--orders", "2", "--passes", "1")
    assert result["n_tasks"] == 24
    assert result["config"]["n_embedded"] == 12


def test_cold_is_a_replay_of_one_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same flags, the same object under its own name."""
    more = ["--orders", "2", "--policies", "linucb"]
    capsys.readouterr()
    assert main(["lab", "cold", *argv(folder, *more, "--json")[2:]]) == 0
    cold = json.loads(capsys.readouterr().out)
    assert cold == {**replay(capsys, folder, *more, "--passes", "1"), "name": "lab.cold"}
    assert cold["config"]["scored"] == "only pass"


def test_the_policy_too_is_chosen_on_the_other_half(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Among policies that make one attempt a task; a cascade's gain is bought with attempts and does not count."""
    more = ["--orders", "3", "--passes", "4", "--verification", "best"]
    result = replay(capsys, folder, *more, "--policies", "linucb,random,cascade")
    values = result["values"]
    assert values["chosen.best.over_hull_cross_fitted_pp"] == values["linucb.best.over_hull_cross_fitted_pp"]
    assert values["cascade.best.over_hull_cross_fitted_pp"] > values["linucb.best.over_hull_cross_fitted_pp"]
    assert not any(name.startswith("chosen") for name in replay(capsys, folder, *more, "--policies", "lints")["values"])


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**30])
def test_seeds_are_those_of_simulate(folder: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """A seed that `simulate` refuses is refused here in the same words, before anything is read."""
    assert main(argv(folder, "--json", "--seed", str(seed))) == 2
    assert f"seed is {seed}; it must be >= -2**63 and < 2**64" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_the_outermost_seeds_replay(folder: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """The range is closed where it says so."""
    more = ["--passes", "1", "--orders", "1", "--policies", "random", "--cost-weights", "0", "--seed", str(seed)]
    assert replay(capsys, folder, *more)["seeds"] == [seed]


def test_a_quick_look_is_a_small_replay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--quick` is what its parts are by hand, and asks no more than was asked."""
    options = ("--policies", "linucb", "--cost-weights", "0,1")
    quick = replay(capsys, folder, "--quick", *options)
    by_hand = replay(capsys, folder, "--orders", "1", "--passes", "2", "--draws", "200", *options)
    assert quick == by_hand and quick["config"]["n_draws"] == 200
    less = replay(capsys, folder, "--quick", "--passes", "1", "--draws", "50", *options)["config"]
    assert (less["n_orders"], less["n_passes"], less["n_draws"]) == (1, 1, 50)


def test_equally_dear_models_stay_equally_dear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every run costs the same, the dust of sums makes no mix and no cheaper model: gains are over the best."""
    rates = {"small": 0.3, "big": 0.8}
    rows = [
        row(f"t{i:03}", model=model, cost_usd=0.1, success=float((7 * i) % 10 < 10 * rate))
        for i in range(70)
        for model, rate in rates.items()
    ]
    write(tmp_path, rows)
    asked = ["--stream", "swe", "--models", "small,big", "--policies", "random,linucb", "--orders", "3", "--json"]
    capsys.readouterr()
    assert main(["lab", "cold", "--outcomes", str(tmp_path), *asked]) == 0
    result = json.loads(capsys.readouterr().out)
    best = result["singles"]["big"]["success"]
    for one in result["points"]:
        assert one["hull_gain_pp"] == pytest.approx(100.0 * (one["success"] - best), abs=1e-6)
    for name, value in result["values"].items():
        low, high = result["ci95"][name]
        assert low - 1e-9 <= value <= high + 1e-9, name
