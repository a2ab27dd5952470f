"""`loadwise whatif`: what another policy would have earned on the programs of a journal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from loadwise import __version__
from loadwise.journal.entry import Entry
from loadwise.journal.files import list_segments
from loadwise.journal.reader import is_stub, read, read_header
from loadwise.kernel.errors import ConfigError, JournalError
from loadwise.settings import Config, config_from_builtins

from .report import commit, machine
from .whatif_estimate import Estimates, Sample, estimate, make_sample
from .whatif_log import OUTCOMES, Log, Refusal, read_log
from .whatif_target import Target, make_target, parse_target, prior_of

EFFECTIVE_MIN = 10.0
"""Fewer effective decisions say nothing that an interval could be trusted with."""

LEARN_RATIO = 0.5


class Answer(NamedTuple):
    """The estimates, and what they rest on."""

    log: Log
    target: Target
    estimates: Estimates
    n_judged: int
    seed: int


def what_if(path: Path, policy: str, *, learn_ratio: float = LEARN_RATIO, seed: int = 0) -> Answer:
    """Evaluate a policy on a journal.

    Raises:
        ConfigError: the policy is none, or a number is out of its range.
        JournalError: no journal, or a damaged one.
        Refusal: the journal cannot tell.
    """
    segments = list_segments(path)
    if not segments:
        raise JournalError(f"journal {str(path)!r} holds no segment")
    # Where all are torn, the last one's header says what is wrong.
    last = next((one for one in reversed(segments) if not is_stub(one.path)), segments[-1])
    config = config_from_builtins(read_header(last.path)[0].config)
    return answer(read(path), config, policy, learn_ratio=learn_ratio, seed=seed)


def answer(
    entries: Iterable[Entry], config: Config, policy: str, *, learn_ratio: float = LEARN_RATIO, seed: int = 0
) -> Answer:
    """Evaluate a policy on the entries of a journal that was written under `config`."""
    if not 0.0 < learn_ratio < 1.0:
        raise ConfigError(f"learn ratio is {learn_ratio!r}; it must be in (0, 1)")
    return evaluate(read_log(entries, config.models), config, policy, learn_ratio=learn_ratio, seed=seed)


def evaluate(log: Log, config: Config, policy: str, *, learn_ratio: float = LEARN_RATIO, seed: int = 0) -> Answer:
    """Evaluate a policy on the decisions of a journal."""
    models = tuple(dict.fromkeys((*log.models, *config.models)))
    arm = parse_target(policy, models)
    target = make_target(log, arm, config.router.context, learn_ratio, seed, prior_of(config.router.policy))
    sample = make_sample(target.decisions, log.models, target.probabilities)
    _require_support(log, target, sample)
    estimates = estimate(sample)
    return Answer(log, target, estimates, int(sample.judged.sum()), seed)


def _require_support(log: Log, target: Target, sample: Sample) -> None:
    """Every choice that the policy would make must have had a chance, and been made and judged often enough."""
    if not sample.judged.any():
        raise Refusal(f"none of {len(target.decisions)} decisions has a verdict: nobody said what they were worth")
    for place, model in enumerate(log.models):
        wanted = target.probabilities[:, place] > 0.0
        unheard = wanted & (sample.propensities[:, place] <= 0.0)
        if unheard.any():
            ids = [one.decision_id for one, is_unheard in zip(target.decisions, unheard, strict=True) if is_unheard]
            raise Refusal(
                f"policy {target.label!r} would choose model {model!r} in {len(ids)} of {len(target.decisions)}"
                f" decisions in which the log gave it no chance (decisions {', '.join(map(str, ids[:5]))}"
                f"{', ...' if len(ids) > 5 else ''})"
            )
        if wanted.any() and not (sample.judged & (sample.chosen == place)).any():
            raise Refusal(
                f"policy {target.label!r} would choose model {model!r}, of which the log has no judged decision"
                f" among the {len(target.decisions)} that it is evaluated on"
            )
    effective_n = sample.effective_n
    if effective_n < EFFECTIVE_MIN:
        n = len(target.decisions)
        by_model = sample.variation(sample.target, 2).sum(axis=0)
        rarest = log.models[int(by_model.argmax())]
        why = "" if n < EFFECTIVE_MIN else f", for where it chooses model {rarest!r} the log seldom did"
        raise Refusal(
            f"{n} decisions are worth {effective_n:.1f} of policy {target.label!r}{why}; at least {EFFECTIVE_MIN:g}"
            f" are needed, which some {round(n * EFFECTIVE_MIN / effective_n)} such decisions would give"
        )


def as_json(found: Answer) -> dict[str, Any]:
    """The one object of `--json`. A bare outcome name is the doubly robust figure."""
    by_name = dict(found.estimates.by_name)
    by_name |= {outcome: by_name[f"{outcome}.dr"] for outcome in OUTCOMES}
    target = found.target
    return {
        "name": "whatif",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": [found.seed],
        "config": {"policy": target.label, "mode": target.mode, "n_learned": target.n_learned},
        "values": {
            **{name: one.value for name, one in sorted(by_name.items())},
            "effective_n": found.estimates.effective_n,
            "kish_n": found.estimates.kish_n,
            "weight_max": found.estimates.weight_max,
        },
        "ci95": {name: [one.low, one.high] for name, one in sorted(by_name.items())},
        "peers": {},
        "checks": [],
        "n_decisions": len(target.decisions),
        "n_judged": found.n_judged,
        "n_unjudged": len(target.decisions) - found.n_judged,
        "n_abstained": found.log.n_abstained,
        "excluded": dict(found.log.excluded),
        "logged_policies": list(found.log.policies),
    }


def as_rows(found: Answer) -> list[tuple[str, ...]]:
    """The estimates as cells for a terminal."""
    rows: list[tuple[str, ...]] = [("outcome", "estimator", "value", "95 %")]
    for outcome in OUTCOMES:
        for key in ("dr", "snips", "ips", "logged", "gain"):
            one = found.estimates.by_name[f"{outcome}.{key}"]
            rows.append((outcome, key, f"{one.value:.4f}", f"[{one.low:.4f}, {one.high:.4f}]"))
    return rows


def as_notes(found: Answer) -> list[str]:
    """What the numbers rest on, in sentences."""
    target, log, estimates = found.target, found.log, found.estimates
    n = len(target.decisions)
    learned = f" after {target.n_learned} earlier verdicts" if target.mode == "frozen" else ""
    notes = [
        f"policy {target.label} ({target.mode}{learned}) on {n} decisions, worth {estimates.effective_n:.0f} of its own"
        f" (effective sample size; largest weight {estimates.weight_max:.0f})"
    ]
    if found.n_judged < n:
        notes.append(
            f"{n - found.n_judged} of them have no verdict; the others speak for them, by model and task type"
            f" ({log.n_abstained} verdicts of the journal abstained)"
        )
    if log.excluded:
        notes.append("left out: " + ", ".join(f"{count} {reason}" for reason, count in sorted(log.excluded.items())))
    return notes
