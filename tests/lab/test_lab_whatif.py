"""What-if: propensities as they were, estimates that hit a known truth, refusals where the log cannot tell."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadwise.cli.main import main
from loadwise.journal.entry import Entry, make_header
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import RecordCredit, RecordDecision
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.streams import Streams
from loadwise.lab.whatif import answer, as_json, evaluate
from loadwise.lab.whatif_estimate import student_quantile
from loadwise.lab.whatif_log import Refusal, read_log
from loadwise.lab.whatif_world import WorldSpec, draw_programs, outcomes_of, world_config, write_log
from loadwise.policy.base import Candidate, Context
from loadwise.policy.prior import Prior
from loadwise.policy.registry import PolicySpec, make_policy
from loadwise.settings import Config, open_stack

SPEC = WorldSpec(
    name="test",
    success={"small": {"a": 0.4, "b": 0.8}, "large": {"a": 0.7, "b": 0.75}},
    usd_per_million={"small": 0.5, "large": 4.0},
    n_components=2,
)
CONFIG = world_config(SPEC)
ALIKE = WorldSpec(**{**msgspec.structs.asdict(SPEC), "policy": "random"})


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    """600 programs under preset loadwise."""
    return write_log(SPEC, CONFIG, 600, 3)


@pytest.fixture(scope="module")
def by_chance() -> tuple[list[Entry], Config]:
    """1,500 programs under a uniform lottery."""
    config = world_config(ALIKE)
    return write_log(ALIKE, config, 1500, 4), config


def truth(spec: WorldSpec, config: Config) -> np.ndarray:
    """Mean success, cost and reward of each model of the world, shape (models, 3)."""
    means: np.ndarray = outcomes_of(spec, config, draw_programs(spec, 50_000, np.random.default_rng(9))).mean(axis=0)
    return means


def doctored(entries: list[Entry], change: Any, *, credits: bool = False) -> list[Entry]:
    """The entries with every decision (or credit) passed through a function; None drops it."""

    def pick(found: Any) -> Any:
        changed = (change(one) for one in found)
        return tuple(one for one in changed if one is not None)

    field = "credits" if credits else "decisions"
    return [msgspec.structs.replace(entry, **{field: pick(getattr(entry, field))}) for entry in entries]


def test_every_estimator_hits_the_truth_of_a_lottery(by_chance: tuple[list[Entry], Config]) -> None:
    """1,500 programs, half of them of each model: and every figure is within twice its interval."""
    entries, config = by_chance
    true = truth(ALIKE, config)
    for place, model in enumerate(ALIKE.models):
        found = answer(entries, config, f"fixed:{model}").estimates
        for column, outcome in enumerate(("success", "cost_usd", "reward")):
            for key in ("ips", "snips", "dr"):
                one = found.by_name[f"{outcome}.{key}"]
                wide = (one.high - one.low) / 2.0
                assert one.low - wide <= true[place, column] <= one.high + wide, (model, outcome, key)
        assert found.effective_n == pytest.approx(750 * 0.95, rel=0.1)


def test_a_policy_evaluated_on_its_own_log_is_what_it_earned(by_chance: tuple[list[Entry], Config]) -> None:
    """All weights are one: the estimate is the mean, and the gain is nothing."""
    entries, config = by_chance
    found = answer(entries, config, "random").estimates
    credits = [credit for entry in entries for credit in entry.credits]
    mean = float(np.mean([credit.success for credit in credits]))
    assert found.by_name["success.snips"].value == pytest.approx(mean, abs=0.01)
    assert found.by_name["success.gain"] == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    assert found.weight_max < 1.3  # only the missing verdicts weigh


def test_mixing_is_between_its_models(by_chance: tuple[list[Entry], Config]) -> None:
    """As JSON or as a query, and linear in its weights."""
    entries, config = by_chance
    ends = [answer(entries, config, f"fixed:{model}").estimates.by_name["cost_usd.ips"].value for model in SPEC.models]
    for said in (
        '{"name": "mixing", "weights": {"small": 0.25, "large": 0.75}}',
        'mixing?weights={"small":1,"large":3}',
    ):
        if said.startswith("mixing"):
            said = 'mixing?weights={"small":0.25,"large":0.75}'
        found = answer(entries, config, said).estimates.by_name["cost_usd.ips"].value
        assert found == pytest.approx(0.25 * ends[0] + 0.75 * ends[1])


def test_turns_are_the_policys_own(by_chance: tuple[list[Entry], Config]) -> None:
    """Round robin takes each model every other time, whatever the log's policy chose."""
    entries, config = by_chance
    found = answer(entries, config, "round_robin")
    assert found.target.mode == "own turn"
    assert found.target.probabilities.mean(axis=0).tolist() == [0.5, 0.5]


def test_a_learner_is_frozen_after_the_first_part(entries: list[Entry]) -> None:
    """It learns from the first share and is evaluated on what is left; the two never meet."""
    found = answer(entries, CONFIG, "linucb?alpha=0.1", learn_ratio=0.25)
    assert found.target.mode == "frozen" and len(found.target.decisions) == 450
    assert 0 < found.target.n_learned <= 150
    first_id = found.target.decisions[0].decision_id
    assert all(one.decision_id >= first_id for one in found.target.decisions)
    with pytest.raises(ConfigError, match="learn ratio"):
        answer(entries, CONFIG, "linucb", learn_ratio=1.0)


def test_estimates_do_not_depend_on_unjudged_decisions_that_are_missing_by_chance() -> None:
    """A third of the verdicts lost: counted, said, and the interval still holds the truth."""
    spec = WorldSpec(**{**msgspec.structs.asdict(ALIKE), "loss_ratio": 0.33})
    config = world_config(spec)
    found = answer(write_log(spec, config, 1500, 5), config, "fixed:large")
    assert found.n_judged == pytest.approx(1000, abs=80)
    one = found.estimates.by_name["success.dr"]
    assert one.low <= truth(spec, config)[1, 0] <= one.high
    assert as_json(found)["n_unjudged"] == 1500 - found.n_judged


def test_pinned_and_fallback_decisions_are_left_out_and_counted(entries: list[Entry]) -> None:
    """And what a fallback replaced, and a further attempt, and what a failed policy's stand-in chose."""
    reasons = {1: "pinned", 2: "policy_fallback", 3: "escalation", 4: "selector", 5: "selector_fallback"}

    def change(decision: RecordDecision) -> RecordDecision:
        if decision.decision_id == 7:  # of the program that decision 6 began
            return msgspec.structs.replace(decision, reason="fallback", program_id="p5")
        return msgspec.structs.replace(decision, reason=reasons.get(decision.decision_id, "policy"))

    log = read_log(doctored(entries, change), CONFIG.models)
    assert log.excluded == {"pinned": 1, "policy_fallback": 1, "escalation": 1, "fallback": 1, "superseded": 1}
    assert len(log.decisions) == 595


def test_a_correction_takes_the_place_of_the_credit(entries: list[Entry]) -> None:
    """The later credit of a decision stands; a withdrawn one is none."""
    credit = next(credit for entry in entries for credit in entry.credits)
    later = msgspec.structs.replace(credit, success=1.0 - credit.success, replaced_reward=credit.reward)
    extra = msgspec.structs.replace(entries[-1], credits=(later,))
    place = {one.decision_id: one for one in read_log([*entries, extra], CONFIG.models).decisions}
    assert place[credit.decision_id].outcome is not None
    assert place[credit.decision_id].outcome[0] == 1.0 - credit.success
    gone = msgspec.structs.replace(extra, credits=(msgspec.structs.replace(later, is_withdrawn=True),))
    place = {one.decision_id: one for one in read_log([*entries, gone], CONFIG.models).decisions}
    assert place[credit.decision_id].outcome is None


def test_a_deterministic_log_is_refused() -> None:
    """Preset oracle leaves nothing to chance, and the refusal says so."""
    spec = WorldSpec(**{**msgspec.structs.asdict(SPEC), "policy": "oracle"})
    config = world_config(spec)
    log = write_log(spec, config, 50, 1)
    for said in ("oracle", "random", "fixed:small"):
        with pytest.raises(Refusal, match="nothing to chance"):
            answer(log, config, said)


def test_missing_propensities_are_refused_by_name(entries: list[Entry]) -> None:
    """Many missing: refused with policy and decisions; few: counted."""

    def silent(decision: RecordDecision, until: int) -> RecordDecision:
        if decision.decision_id > until:
            return decision
        views = tuple(msgspec.structs.replace(view, propensity=None) for view in decision.candidates)
        return msgspec.structs.replace(decision, candidates=views)

    with pytest.raises(Refusal, match=r"300 of 600 .*linucb.*decisions 1, 2"):
        read_log(doctored(entries, lambda one: silent(one, 300)), CONFIG.models)
    assert read_log(doctored(entries, lambda one: silent(one, 30)), CONFIG.models).excluded == {"no_propensity": 30}


def test_a_model_without_a_chance_is_refused_by_name(by_chance: tuple[list[Entry], Config]) -> None:
    """In some decisions it was a candidate with propensity zero."""
    entries, config = by_chance

    def starve(decision: RecordDecision) -> RecordDecision:
        if decision.decision_id not in (10, 11) or decision.chosen == "large":
            return decision
        views = tuple(
            msgspec.structs.replace(view, propensity=float(view.candidate == decision.chosen))
            for view in decision.candidates
        )
        return msgspec.structs.replace(decision, candidates=views)

    starved = doctored(entries, starve)
    n = sum(view.propensity == 0.0 for entry in starved for one in entry.decisions for view in one.candidates)
    if n:
        with pytest.raises(Refusal, match=r"'large'.*no chance"):
            answer(starved, config, "fixed:large")
    answer(starved, config, "fixed:small")


def test_a_model_that_was_never_judged_is_refused_by_name(by_chance: tuple[list[Entry], Config]) -> None:
    """It ran, and nobody said how."""
    entries, config = by_chance

    def unheard(credit: RecordCredit) -> RecordCredit | None:
        return None if credit.model == "large" else credit

    with pytest.raises(Refusal, match=r"'large'.*no judged decision"):
        answer(doctored(entries, unheard, credits=True), config, "random")


def test_too_little_support_is_refused_with_what_would_do(entries: list[Entry]) -> None:
    """600 programs under a floor of 2 % are worth a handful of what was seldom chosen."""
    log = read_log(entries[: 3 * 120], CONFIG.models)
    with pytest.raises(Refusal, match=r"are worth [0-9.]+ of policy .*at least 10"):
        evaluate(log, CONFIG, "fixed:small")


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("linucb", {"exploration_floor": 0.1}),
        ("lints", {"exploration_floor": 0.02}),
        ("epsilon_greedy", {}),
        ("power_of_two", {}),
        ("mixing", {"weights": {"a": 0.2, "b": 0.3, "c": 0.5}}),
    ],
)
def test_recorded_propensities_are_the_frequencies_of_choices(policy: str, options: dict[str, Any]) -> None:
    """Asked again and again in one state, a policy chooses each candidate as often as it says (five deviations)."""
    made = make_policy(PolicySpec(name=policy, options=options))
    candidates = [
        Candidate(name=name, price_usd=price, n_running=n)
        for name, price, n in zip("abc", (1, 2, 3), (4, 0, 2), strict=True)
    ]
    x = np.array([1.0, 0.5])
    from loadwise.policy.base import Feedback

    for number, (name, reward) in enumerate([("a", 1.0), ("b", 0.5), ("c", 0.2), ("a", 0.0), ("b", 1.0)]):
        made.observe(number, name, x)
        made.learn(Feedback(decision_id=number, candidate=name, x=x, reward=reward))
    streams = Streams(5)
    n = 20_000
    seen: Counter[int] = Counter()
    for number in range(n):
        context = Context(decision_id=number, x=x)
        choice = made.choose(context, candidates, streams.at("policy", number))
        seen[choice.chosen] += 1
    told = choice.propensities or made.propensities(choice, streams.at("propensity", 1))
    for index, propensity in enumerate(told):
        noise = (propensity * (1.0 - propensity) / n) ** 0.5 + (0.008 if choice.propensities is None else 0.0)
        assert seen[index] / n == pytest.approx(propensity, abs=5.0 * noise + 1e-9), (policy, index)


def test_student_quantiles() -> None:
    """Against printed tables."""
    table = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 20: 2.086, 60: 2.000, 1e9: 1.960}
    for freedom, quantile in table.items():
        assert student_quantile(freedom) == pytest.approx(quantile, abs=2e-3)


def test_intervals_cover(by_chance: tuple[list[Entry], Config]) -> None:
    """Forty short logs of preset loadwise: the interval holds the truth in at least 34 (P < .001 at 95 %)."""
    true = truth(SPEC, CONFIG)
    covered = 0
    for seed in range(40):
        one = answer(write_log(SPEC, CONFIG, 300, 900 + seed), CONFIG, "random").estimates.by_name["success" + ".dr"]
        covered += one.low <= true[:, 0].mean() <= one.high
    assert covered >= 34


def write(folder: Path, entries: list[Entry], config: Config, seed: int) -> Path:
    """A journal directory that a machine of the configuration would have written for the entries' events."""
    stack = open_stack(config, seed)
    writer = JournalWriter(folder, make_header(msgspec.to_builtins(config), seed=seed, host="sim"))
    for entry in entries:
        writer.append(entry.event, stack.handle(entry.event))
    writer.close()
    return folder


def test_the_command_prints_one_object(
    tmp_path: Path, by_chance: tuple[list[Entry], Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every promised key, a bare outcome is the doubly robust figure; a table without --json; refusals are status 1."""
    entries, config = by_chance
    path = str(write(tmp_path / "journal", entries, config, 4))
    assert main(["whatif", path, "--policy", "fixed:large", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert {"name", "version", "commit", "machine", "seeds", "config", "values", "ci95", "peers", "checks"} <= set(
        result
    )
    assert result["values"]["success"] == result["values"]["success.dr"]
    assert result["n_decisions"] == 1500 and result["excluded"] == {}
    low, high = result["ci95"]["success"]
    assert low <= result["values"]["success"] <= high
    assert main(["whatif", path, "--policy", "loadwise"]) == 0
    assert "reward" in capsys.readouterr().out
    for said in ("fixed", "nope", "cascade", "fixed:nope", '{"name": 3}', '{"name":"mixing","weights":{"nope":1}}'):
        assert main(["whatif", path, "--policy", said]) == 2, said
    assert main(["whatif", str(tmp_path / "none"), "--policy", "random"]) == 2


def test_a_learner_begins_with_the_packs_word_of_the_journal() -> None:
    """A gateway with an experience pack gives it to every policy that takes one, so what-if does, too."""
    prior = Prior(
        success=(0.0,) * 3,
        success_blind=(0.0,) * 3,
        cost=(0.0,) * 3,
        cost_blind=(0.0,) * 3,
        counts=(1e6,) * 5,
        means={"small": (0.9, 0.0, 0.0, 0.0, 0.0), "large": (-0.9, 0.0, 0.0, 0.0, 0.0)},
        mean_of_others=(0.0,) * 5,
        doubt=100.0,
    )
    spec = WorldSpec(**{**msgspec.structs.asdict(SPEC), "policy": "random", "n_components": 0})
    config = world_config(spec)
    entries = write_log(spec, config, 300, 5)
    policy = PolicySpec(name="linucb", options={"prior": msgspec.to_builtins(prior)})
    packed = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, policy=policy))
    found = answer(entries, packed, "linucb?alpha=0&prior_strength=2")
    assert (found.target.probabilities[:, found.log.models.index("small")] == 1.0).all()
    with pytest.raises(ConfigError, match="without a pack"):
        answer(entries, config, "linucb?prior_strength=2")


def test_a_journal_without_a_verdict_is_refused_as_such(entries: list[Entry]) -> None:
    """Whatever the policy, the reason is that nobody judged, not that some model was rare."""
    silent = doctored(entries, lambda _: None, credits=True)
    with pytest.raises(Refusal, match="none of 600 decisions has a verdict"):
        answer(silent, CONFIG, "random")


@pytest.mark.parametrize("data", [b"", b"models:\n", b"\x89LWJ\r\n\x1a\n", b"\x89LWJ\r\n\x1a\n\xfeLW\xff"])
def test_what_is_no_journal_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    """Whatever lies there, the command says so with status 1."""
    path = tmp_path / "x.journal"
    path.write_bytes(data)
    assert main(["whatif", str(path), "--policy", "random"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "x.journal" in said.err
