"""`loadwise lab mismatch`: a verifier that cannot read a family teaches nothing of it, the adaptive one what it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab_folder import invented

from loadwise.cli.main import main
from loadwise.kernel.errors import ConfigError
from loadwise.lab.feedback import FeedbackSpec, misclassified
from loadwise.lab.mismatch import MismatchConfig, read_selector

KEYS = {"name", "version", "commit", "machine", "seeds", "config", "values", "ci95", "peers", "checks"}
QUICK = ["--orders", "3", "--passes", "4", "--seeds", "0,1", "--cost-weights", "0,1", "--draws", "200"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families that want different models."""
    return invented(tmp_path_factory.mktemp("lab"), n_per_family=40)


def argv(folder: Path, *more: str) -> list[str]:
    stream = ["--outcomes", str(folder), "--stream", "swe,chat", "--models", "small,big"]
    return ["lab", "mismatch", *stream, *QUICK, *more]


def mismatch(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> Any:
    """The one object on stdout."""
    capsys.readouterr()
    assert main(argv(folder, "--json", *more)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_the_object_has_every_key_that_was_promised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of the mixed stream and of each family alone with intervals, points, checks."""
    result = mismatch(capsys, folder)
    assert set(result) == KEYS | {"points", "singles", "n_tasks"}
    assert result["seeds"] == [0, 1]
    assert set(result["values"]) == set(result["ci95"])
    for family in ("swe", "chat"):
        for arm in ("patch_only", "adaptive", "best_fixed"):
            assert f"alone.{family}.{arm}.gain_pp" in result["values"]
            assert f"mixed.{family}.{arm}.success" in result["values"]
    assert {(point["verification"], point["cost_weight"]) for point in result["points"]} == {
        (arm, weight) for arm in ("patch_only", "adaptive", "best_fixed") for weight in (0.0, 1.0)
    }
    for key, value in result["values"].items():
        low, high = result["ci95"][key]
        assert low - 1e-9 <= value <= high + 1e-9


def test_patches_alone_teach_nothing_of_another_family(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside SWE patch-only does not gain, adaptive does; on SWE they are one."""
    values = mismatch(capsys, folder, "--misclassified", "0")["values"]
    assert values["alone.chat.patch_only.gain_pp"] < 3.0
    assert values["alone.chat.adaptive.gain_pp"] > 10.0
    for family in ("swe", "chat"):
        assert values[f"alone.{family}.adaptive_minus_best_fixed_pp"] == 0.0
    assert values["alone.swe.patch_only.gain_pp"] == values["alone.swe.best_fixed.gain_pp"]
    assert values["mixed.chat.adaptive_over_patch_only_pp"] > 5.0
    gap = values["mixed.chat.adaptive.success"] - values["mixed.chat.patch_only.success"]
    assert values["mixed.chat.adaptive_over_patch_only_pp"] == pytest.approx(100.0 * gap)


def test_a_selector_that_is_always_wrong_teaches_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With q = 0 nothing is learned of any family."""
    values = mismatch(capsys, folder, "--misclassified", "1")["values"]
    assert values["alone.chat.adaptive.gain_pp"] == values["alone.chat.patch_only.gain_pp"]
    assert values["alone.swe.adaptive.gain_pp"] < values["alone.swe.best_fixed.gain_pp"]


def test_the_selector_s_own_figures_may_be_given(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--selector FILE` takes 1 - q from a result of `lab selector`, of ORACLE's classes where it has them."""
    file = tmp_path / "selector.json"
    said = {"all.k5.swe.accuracy": 0.5, "three.k5.swe.accuracy": 0.875, "all.k5.chat.accuracy": 0.75}
    file.write_text(json.dumps({"values": said}))
    result = mismatch(capsys, folder, "--selector", str(file))
    assert result["config"]["misclassified_ratio"] == {"swe": 0.125, "chat": 0.25}


def test_a_family_of_a_joint_class_has_its_own_figure(tmp_path: Path) -> None:
    """Where the selector tells two families as one class, each has its accuracy; else the class' one."""
    file = tmp_path / "selector.json"
    file.write_text(json.dumps({"values": {"all.k5.family.terminal1.accuracy": 0.5, "all.k5.terminal.accuracy": 0.75}}))
    assert read_selector(str(file), ("terminal1", "terminal2", "other")) == {"terminal1": 0.5, "terminal2": 0.25}


@pytest.mark.parametrize("content", ["no", "{}", '{"values": {"all.k5.swe.accuracy": "x"}}', '{"values": {}}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    """The file is named."""
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ConfigError, match=r"s\.json"):
        read_selector(str(tmp_path / "s.json"), ("swe",))


def test_tables_and_plot_are_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a reader, for the eye, for a terminal."""
    pytest.importorskip("matplotlib")
    more = ["--markdown", str(tmp_path / "t.md"), "--plot", str(tmp_path / "p.svg")]
    assert main(argv(folder, *more)) == 0
    assert "| chat |" in (tmp_path / "t.md").read_text()
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert "alone.chat.patch_only.gain_pp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seeds", "0,0"], "each once"),
        (["--cost-weights", "1"], "0 must be among them"),
        (["--selector", "/no/such"], "/no/such"),
        (["--plot", "p.txt"], ".png"),
        (["--plot", "/no/such/p.png"], "cannot be written"),
        (["--misclassified", "2"], "must be in [0, 1]"),
        (["--policy", "nobody"], "unknown"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    """Status 2 and the reason."""
    assert main(argv(folder, *more)) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_families_may_be_mistaken_for_others_at_their_own_rates() -> None:
    """One ratio for all wins over those by family, and these over ORACLE's."""
    spec = FeedbackSpec(misclassified_by_family={"swe": 0.5})
    assert (misclassified(spec, "swe"), misclassified(spec, "tau2")) == (0.5, 0.01)
    assert misclassified(FeedbackSpec(misclassified=0.25, misclassified_by_family={"swe": 0.5}), "swe") == 0.25
    with pytest.raises(ConfigError, match=r"misclassified of 'swe' is 1\.5"):
        FeedbackSpec(misclassified_by_family={"swe": 1.5})
    config = MismatchConfig(outcomes="x", families=("swe",), models=("a", "b"), misclassified={"swe": 0.2})
    assert misclassified(config.feedback, "swe") == 0.2
