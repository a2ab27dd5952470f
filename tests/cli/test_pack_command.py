"""`loadwise pack`, and a gateway that begins with a pack."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import POOL, run

from loadwise.cli.pool import read_pool
from loadwise.cli.serve import _embedder_of
from loadwise.gateway.serve import gateway_config
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.policy.base import Candidate, Context
from loadwise.policy.registry import make_policy
from loadwise.settings import open_stack

pytest.importorskip("pyarrow")

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ROOT / "docs/formats/outcomes-sample"
SAMPLE = ROOT / "docs/formats/pack-sample.json"


def test_the_sample_is_what_the_command_builds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Built anew it says the same of every model, and the page's sample can be shown."""
    out = tmp_path / "x.json"
    built = run(capsys, "pack", "build", "--outcomes", OUTCOMES, "--licence", "invented", "--out", out, "--json")
    shown = run(capsys, "pack", "show", SAMPLE, "--json")
    assert (built.status, shown.status) == (0, 0)
    assert built.json["licence"] == "invented"
    assert built.json["reads_texts"]
    for model, abilities in shown.json["models"].items():
        for family, ability in abilities.items():
            assert built.json["models"][model][family] == {name: pytest.approx(v) for name, v in ability.items()}
    assert "over a middling model" in run(capsys, "pack", "show", out).out


def test_families_models_and_tasks_may_be_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is left out is not in the pack."""
    tasks = tmp_path / "tasks.txt"
    out = tmp_path / "x.json"
    base = ("pack", "build", "--outcomes", OUTCOMES, "--out", out, "--json")
    some = run(capsys, *base, "--families", "chat", "--exclude-models", "big", "--embedder", "none").json
    assert (list(some["families"]), list(some["models"]), some["reads_texts"]) == (["chat"], ["small"], False)
    tasks.write_text("nowhere\tx\n")
    assert "no run of" in run(capsys, *base, "--tasks", tasks).err
    tasks.write_text("no tab\n")
    assert "line 1: 'no tab' is not FAMILY" in run(capsys, *base, "--tasks", tasks).err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--families", "nope"], "family 'nope' has no outcome"),
        (["--models", "nope"], "model 'nope' has no outcome; known: big, small"),
        (["--exclude-models", "nope"], "model 'nope' has no outcome"),
        (["--exclude-models", "big,small"], "no run of"),
        (["--models", "big,big"], "not a list of different names"),
        (["--embedder", "nope"], "embedder 'nope' is unknown"),
        (["--tasks", "/no/such/file"], "cannot be read"),
        (["--out", "/no/such/folder/x.json"], "is not a folder"),
        (["--out", "/"], "'/' cannot be written: it is a folder"),
        (["--outcomes", "/no/such/folder"], "does not exist"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], said: str
) -> None:
    """Status two, and no pack."""
    out = tmp_path / "x.json"
    ran = run(capsys, "pack", "build", "--outcomes", OUTCOMES, "--out", out, *more)
    assert ran.status == 2
    assert said in ran.err.splitlines()[-1]
    assert not out.exists()


def test_a_cold_replay_takes_a_pack_and_siblings(capsys: pytest.CaptureFixture[str]) -> None:
    """And refuses siblings without one, or of nobody."""
    base = ("lab", "cold", "--outcomes", OUTCOMES, "--stream", "swe,chat", "--models", "small,big")
    quick = ("--policies", "linucb", "--orders", "1", "--draws", "5", "--json")
    told = run(capsys, *base, *quick, "--pack", SAMPLE, "--siblings", "small=big").json
    assert told["config"]["packs"][0]["n_tasks_told"] == 24
    assert told["config"]["siblings"] == {"small": "big"}
    assert "no pack is given" in run(capsys, *base, *quick, "--siblings", "small=big").err
    assert "is not in the pack" in run(capsys, *base, *quick, "--pack", SAMPLE, "--siblings", "small=x").err
    assert "is not, once each, MODEL=OTHER" in run(capsys, *base, *quick, "--pack", SAMPLE, "--siblings", "x").err


def test_a_gateway_begins_with_what_the_pack_says(tmp_path: Path) -> None:
    """The policy's first choice follows the pack, by task type, and its configuration opens without the file."""
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.replace("big-1.5b", "big"))
    said = [f"gateway.pack={SAMPLE}", "task_types={swe: {}, chat: {}}", "router.exploration_floor=0"]
    config = read_pool(path, said)
    config, embedder = _embedder_of(config, gateway_config(config))
    assert embedder is not None
    context = config.router.context
    reading = embedder.read_now("Fix the parser")
    assert reading is not None
    components = reading.components
    assert len(components) == context.n_components == 19
    assert context.embedder == embedder.version
    policy = make_policy(config.router.policy, context)
    pool = [Candidate(name="small"), Candidate(name="big")]
    chosen = [
        policy.choose(
            Context(decision_id=1, x=context.features(kind, None, components)), pool, Streams(0).at("policy", 1)
        ).chosen
        for kind in ("swe", "chat")
    ]
    assert chosen == [1, 0]
    open_stack(config, 0)
    embedder.close()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("router.policy=epsilon_greedy", "policy 'epsilon_greedy' has no use for a pack"),
        ("gateway.siblings={small: nobody}", "'nobody', named for 'small', is not in the pack"),
        ("gateway.pack=/no/such/file", "cannot be read"),
    ],
)
def test_a_gateway_refuses_a_pack_that_does_not_fit(tmp_path: Path, said: str, words: str) -> None:
    """Before it listens."""
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    config = read_pool(path, [f"gateway.pack={SAMPLE}", said])
    with pytest.raises(ConfigError, match=words):
        _embedder_of(config, gateway_config(config))
    with pytest.raises(ConfigError, match=r"gateway.pack is not set"):
        gateway_config(read_pool(path, ["gateway.siblings={small: big}"]))
