"""Experience packs: built, written, read, refused, and made ready for a pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from lab_folder import invented, row, write, write_texts

from loadwise.kernel.errors import ConfigError
from loadwise.lab.experiment import ReplayConfig, run_replay
from loadwise.lab.outcomes import read_outcomes, read_texts
from loadwise.lab.pack import BYTES_MAX, Pack, TextModel, read_pack, task_mark, write_pack
from loadwise.lab.pack_build import BuildConfig, build_pack
from loadwise.lab.pack_prior import alike, make_prior
from loadwise.policy.context import ContextSpec
from loadwise.policy.prior import Primed

FAMILIES = ("swe", "chat")
SPEC = ContextSpec(task_types=FAMILIES, domains=("swe/d0", "d1"), n_components=5)


def built(folder: Path, **more: Any) -> Pack:
    """A pack of all outcomes of a folder."""
    config = BuildConfig(FAMILIES, **more)
    return build_pack(read_outcomes(folder, FAMILIES, None), read_texts(folder, FAMILIES), config, None, "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented outcomes whose texts say how dear a task is."""
    folder = invented(tmp_path_factory.mktemp("pack"), n_per_family=40)
    rows, texts = [], {}
    for i in range(60):
        is_long = i % 2 == 0
        texts[f"told-{i:02}"] = ("Rewrite the whole compiler " if is_long else "Fix the typo ") + f"in part {i}"
        for model, price in (("small", 0.01), ("big", 0.1)):
            told = {"family": "swe", "domain": "d2", "model": model, "cost_usd": price * (4.0 if is_long else 0.25)}
            rows.append(row(f"told-{i:02}", **told, success=float(not is_long)))
    write(folder, rows, "told")
    write_texts(folder, texts)
    return folder


@pytest.fixture(scope="module")
def pack(folder: Path) -> Pack:
    """Of both models."""
    return built(folder)


def test_a_pack_says_who_is_strong_where_and_what_it_costs(pack: Pack) -> None:
    """Strengths by family have the sign of the truth, prices the ratio of the truth."""
    assert pack.models["big"]["swe"].success > pack.models["small"]["swe"].success
    assert pack.models["big"]["chat"].success < pack.models["small"]["chat"].success
    for family in FAMILIES:
        dear, cheap = pack.models["big"][family].cost_usd, pack.models["small"][family].cost_usd
        assert dear is not None
        assert cheap is not None
        assert dear / cheap == pytest.approx(10.0, rel=0.15)


def test_a_pack_reads_what_texts_say(pack: Pack) -> None:
    """A text like those of the dear and hard tasks is taken for dear and hard."""
    reader = pack.reader
    assert reader is not None
    hard, easy = reader.told("Rewrite the whole compiler in part 99"), reader.told("Fix the typo in part 98")
    assert hard[1] < easy[1] - 1.0
    assert hard[2] > easy[2] + 1.0


def test_written_and_read_it_is_the_same(pack: Pack, tmp_path: Path) -> None:
    """And the same outcomes give the same bytes."""
    write_pack(pack, tmp_path / "a.json")
    found = read_pack(tmp_path / "a.json")
    assert msgspec.structs.replace(found, sha256="") == pack
    assert found.sha256 == pack.digest
    write_pack(found, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_what_could_not_be_read_is_not_written(pack: Pack, tmp_path: Path) -> None:
    """A price beyond the limit is refused by name, and leaves an earlier file as it was."""
    path = tmp_path / "a.json"
    write_pack(pack, path)
    before = path.read_bytes()
    dear = msgspec.structs.replace(pack.models["big"]["swe"], cost_usd=1e8)
    with pytest.raises(ConfigError, match="cost_usd of model 'big' in family 'swe'"):
        write_pack(msgspec.structs.replace(pack, models={"big": {"swe": dear}}), path)
    assert path.read_bytes() == before


def sealed(pack: Pack, **changes: Any) -> bytes:
    """The file of a changed pack, with a hash that fits."""
    changed = msgspec.structs.replace(pack, **changes)
    return msgspec.json.encode(msgspec.structs.replace(changed, sha256=changed.digest))


def test_what_is_no_pack_is_refused_in_words(pack: Pack, tmp_path: Path) -> None:
    """Every way in which a file may be off is said in one line that names it."""
    path = tmp_path / "x.pack.json"
    whole = json.loads(sealed(pack))
    text = pack.text
    assert text is not None
    ability = pack.models["big"]["swe"]
    cases: list[tuple[bytes, str]] = [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 5000, "is not JSON"),
        (b"[]", "its format is None"),
        (json.dumps({"format": "other"}).encode(), "its format is 'other'"),
        (json.dumps({**whole, "version": 2}).encode(), "has version 2; this version of loadwise reads 1"),
        (json.dumps({**whole, "extra": 1}).encode(), "does not fit its format"),
        (json.dumps({**whole, "families": {"swe": {}}}).encode(), "does not fit its format"),
        (json.dumps({**whole, "licence": "free"}).encode(), "is damaged"),
        (sealed(pack).replace(b'"n_runs":', b'"n_runs":1'), "is damaged"),
        (json.dumps({**whole, "sha256": ""}).encode(), "is damaged"),
        (sealed(pack).replace(b'"cost_bias":', b'"cost_bias":NaN,"x":'), "is not JSON"),
        (sealed(pack).replace(b'"cost_bias":', b'"cost_bias":1e999,"x":'), "is not JSON"),
        (sealed(pack, families={}, models={}, domains={}), "speaks of no family"),
        (sealed(pack, models={"big": {"nope": ability}}), "'nope', which the pack lacks"),
        (
            sealed(pack, models={"big": {"swe": msgspec.structs.replace(ability, success=1.5)}}),
            "success of model 'big'",
        ),
        (sealed(pack, models={"big": {"swe": msgspec.structs.replace(ability, cost_usd=-1.0)}}), "cost_usd of model"),
        (sealed(pack, text=msgspec.structs.replace(text, cost=(1e7, *text.cost[1:]))), "weight 0 of cost"),
        (sealed(pack, text=msgspec.structs.replace(text, cost=text.cost[1:])), "text model has"),
        (sealed(pack, text=msgspec.structs.replace(text, reading="reading-0")), "reads texts by 'reading-0'"),
        (sealed(pack, models={str(i): {} for i in range(1025)}), "1025 models; the limit is 1024"),
        (b" " * (BYTES_MAX + 1), "is larger than"),
    ]
    for data, said in cases:
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=said):
            read_pack(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pack(tmp_path / "missing")


def test_excluded_models_and_tasks_leave_no_trace(folder: Path) -> None:
    """A pack of others' outcomes is the same whatever those left out did."""
    some = frozenset(("swe", f"told-{i:02}") for i in range(0, 60, 3)) | {("chat", "chat-001")}
    found = built(folder, excluded_models=("big",), tasks=some)
    assert set(found.models) == {"small"}
    assert set(found.provenance.tasks) == {task_mark(*task) for task in some}
    assert found.provenance.excluded_models == ("big",)
    with pytest.raises(ConfigError, match="no run of swe, chat is left"):
        built(folder, models=("nobody",))


def test_a_folder_without_texts_or_costs_gives_a_pack(tmp_path: Path) -> None:
    """It then knows kinds of tasks and strengths alone."""
    rows = [row(f"t{i}", model=m, success=float(i % 2), cost_usd=None) for i in range(4) for m in ("a", "b")]
    found = build_pack(read_outcomes(write(tmp_path, rows), ["swe"], None), {}, BuildConfig(("swe",)), None, "none")
    assert found.text is None
    assert found.models["a"]["swe"].cost_usd is None
    prior = make_prior(found, ContextSpec(task_types=("swe",), n_components=3), ["a", "new"]).at(1.0, 2.0)
    assert np.isfinite(Primed(prior).seen(np.ones(5), ["a", "new"])[1]).all()


@pytest.mark.parametrize(
    ("model", "near", "far"),
    [
        ("claude-sonnet-4.5", "claude-sonnet-4", "claude-haiku-4.5"),
        ("gpt-5-mini", "gpt-5.1-codex-mini", "gpt-5-nano"),
        ("qwen3.5-9b", "qwen3-9b", "qwen3.5-27b"),
        ("llama-4-maverick", "Llama-3-Maverick", "mistral-small"),
    ],
)
def test_siblings_are_alike_by_name(model: str, near: str, far: str) -> None:
    """Size says more than version, and writing in capitals says nothing."""
    assert 1.0 >= alike(model, near) > alike(model, far) >= 0.0
    assert alike(model, near) == alike(near, model)


def test_a_known_model_has_its_own_word_and_a_new_one_its_siblings(pack: Pack) -> None:
    """Named siblings give all of theirs, likely ones most of theirs, strangers the mean."""
    own = make_prior(pack, SPEC, ["big", "small"])
    named = make_prior(pack, SPEC, ["new", "small"], {"new": "big"})
    assert named.success_means["new"].tolist() == own.success_means["big"].tolist()
    assert named.cost_means["new"].tolist() == own.cost_means["big"].tolist()
    likely = make_prior(pack, SPEC, ["big-2", "stranger"])
    price = {name: mean[-1] for name, mean in likely.cost_means.items()}
    assert own.cost_means["big"][-1] > price["big-2"] > price["stranger"] > own.cost_means["small"][-1]
    assert price["stranger"] == pytest.approx(likely.others_cost[-1])


def test_wrong_siblings_and_contexts_are_refused(pack: Pack) -> None:
    """Each names the thing."""
    with pytest.raises(ConfigError, match="'nobody', named for 'new', is not in the pack; it has big, small"):
        make_prior(pack, SPEC, ["new"], {"new": "nobody"})
    with pytest.raises(ConfigError, match="'other' is no model of the pool"):
        make_prior(pack, SPEC, ["new"], {"other": "big"})
    with pytest.raises(ConfigError, match="no room"):
        make_prior(pack, ContextSpec(n_components=2), ["new"])


def test_a_prior_predicts_what_the_pack_saw(pack: Pack) -> None:
    """Of known kinds of tasks: success by family and model, dollars by family and model, within luck and shrinkage."""
    prior = make_prior(pack, SPEC, ["big", "small"])
    x = SPEC.features("chat", None, ())
    success = Primed(prior.at(1.0, 0.0)).seen(x, ["big", "small"])[1]
    assert success[0] < success[1] - 0.2
    dollars = -np.array(Primed(prior.at(0.0, 1.0)).seen(x, ["big", "small"])[1])
    assert dollars == pytest.approx([0.1, 0.01], rel=0.25)


def replayed(folder: Path, packs: tuple[str, ...], **more: Any) -> Any:
    """A cold replay of the invented stream."""
    settings = {"n_orders": 4, "n_passes": 1, "policies": ("linucb",), "n_draws": 10, "cost_weights": (0.0, 0.5)}
    return run_replay(
        ReplayConfig(outcomes=str(folder), families=FAMILIES, models=("small", "big"), packs=packs, **settings, **more)
    )


def test_a_cold_replay_with_a_pack_gains(folder: Path, pack: Pack, tmp_path: Path) -> None:
    """Strengths known beforehand are used from the first task on, and what was told is said."""
    write_pack(pack, tmp_path / "all.json")
    with_pack = replayed(folder, (str(tmp_path / "all.json"),))
    without = replayed(folder, ())
    assert with_pack.judged.points[0].success > without.judged.points[0].success + 0.02
    assert with_pack.described["packs"][0]["n_tasks_told"] == 140
    assert with_pack.described["packs"][0]["knows_models"] == ["big", "small"]


def test_each_task_is_scored_with_a_pack_that_has_not_seen_it(folder: Path, tmp_path: Path) -> None:
    """Two packs of halves: every task's row is that of the run with the other half's pack."""
    tasks = sorted(
        {*zip(*(getattr(read_outcomes(folder, FAMILIES, None), n) for n in ("family", "task_id")), strict=True)}
    )
    halves = [frozenset(tasks[place::2]) for place in (0, 1)]
    paths = []
    for place, half in enumerate(halves):
        path = tmp_path / f"{place}.json"
        write_pack(built(folder, tasks=half), path)
        paths.append(str(path))
    alone = [replayed(folder, (path,)) for path in paths]
    both = replayed(folder, tuple(paths))
    for i, task_id in enumerate(both.stream.task_ids):
        told = int((both.stream.families[both.stream.family[i]], task_id) in halves[1])
        assert both.scored[0].success[i] == alone[1 - told].scored[0].success[i]


def test_a_pack_for_another_embedder_is_refused(folder: Path, pack: Pack, tmp_path: Path) -> None:
    """It would read vectors that nobody makes."""
    text = pack.text
    assert text is not None
    wide = TextModel(
        reading=text.reading,
        success=(*text.success, *(0.0,) * 384),
        success_bias=0.0,
        cost=(*text.cost, *(0.0,) * 384),
        cost_bias=0.0,
    )
    path = tmp_path / "x.json"
    for embedder, said in (
        ("minilm-int8-2", "embedder here is 'hash'"),
        ("other-9", "'other-9'"),
        ("none", "no embedder"),
    ):
        write_pack(msgspec.structs.replace(pack, text=wide, embedder=embedder), path)
        with pytest.raises(ConfigError, match=said):
            replayed(folder, (str(path),))


def test_a_pack_is_silent_on_kinds_it_has_not_seen(pack: Pack) -> None:
    """Their coefficients are held no tighter than without a pack; those of kinds it knows are."""
    spec = ContextSpec(task_types=("swe", "law"), domains=("swe/d0", "law/tax"), n_components=3)
    bias, swe, law, d0, tax = make_prior(pack, spec, ["big", "small"]).base.counts[:5]
    assert law == tax == 1.0
    assert min(bias, swe, d0) > 1.0


def test_a_pack_of_other_kinds_costs_little_where_domains_decide(folder: Path, pack: Pack, tmp_path: Path) -> None:
    """Each model can do one of two domains: with a pack that knows neither it is found out as fast as without."""
    rows = [
        row(
            task_id=f"{i:03}",
            family="law",
            domain=f"d{i % 2}",
            model=model,
            success=float(right == i % 2),
            cost_usd=1.0,
        )
        for i in range(160)
        for right, model in enumerate(("small", "big"))
    ]
    write(tmp_path, rows)
    write_pack(pack, tmp_path / "other.json")
    settings = {"n_orders": 4, "n_passes": 1, "policies": ("loadwise",), "n_draws": 10, "cost_weights": (0.0, 0.5)}
    cold = ReplayConfig(outcomes=str(tmp_path), families=("law",), models=("small", "big"), **settings)
    without = run_replay(cold).judged.points[0].success
    told = run_replay(msgspec.structs.replace(cold, packs=(str(tmp_path / "other.json"),))).judged.points[0].success
    assert told > without - 0.02
