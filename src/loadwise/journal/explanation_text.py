"""An explanation as text."""

from collections.abc import Iterator

from loadwise.kernel.work import Verdict
from loadwise.policy.picking import TIE_RATIO

from .explanation import CandidateExplained, DecisionExplained, Explanation


def render_why(explanation: Explanation) -> str:
    """An explanation as text, one decision after the other."""
    lines = [f"program {explanation.program_id}: {_count(explanation.n_turns, 'turn')}, {_ending(explanation)}"]
    for decision in explanation.decisions:
        lines += _decision_lines(decision)
    if explanation.backend_ids:
        lines.append(f"ran on {', '.join(explanation.backend_ids)}")
    if explanation.wait_s is not None:
        lines.append(f"waited {explanation.wait_s:.3f} s")
    lines += [f"turn {one.turn_id} waits since {one.since_s:.3f} s, {one.waits_for}" for one in explanation.waiting]
    lines += [f"refused {text}" for text in explanation.refusals]
    lines += [_verdict_line(verdict) for verdict in explanation.verdicts]
    for credit in explanation.credits:
        of = f" of decision {credit.decision_id} ({credit.model})" if len(explanation.credits) > 1 else ""
        lines.append(
            f"credit{of}: success {_number(credit.success)}, cost ${_number(credit.cost_usd)}, "
            f"reward {_number(credit.reward)}"
        )
    if explanation.n_corrections:
        lines.append(f"the credit was corrected {_count(explanation.n_corrections, 'time')}; only the last counts")
    if not explanation.is_exact:
        lines.append("note: this loadwise does not answer as the one that wrote the journal; commands may differ")
    return "\n".join(lines)


def _ending(explanation: Explanation) -> str:
    if explanation.ended_at_s is None:
        return "open"
    lasted = explanation.ended_at_s - explanation.arrived_at_s
    reason = f" ({explanation.end_reason})" if explanation.end_reason is not None else ""
    return f"ended after {lasted:.3f} s{reason}"


def _decision_lines(decision: DecisionExplained) -> Iterator[str]:
    yield (
        f"decision {decision.decision_id} at {decision.at_s:.3f} s: {decision.chosen} "
        f"by {decision.policy} ({decision.reason}{_from(decision)}; learner {decision.learner_version}, "
        f"context {decision.context_version})"
    )
    if not decision.is_taken:
        yield "    a further attempt was offered; nothing ran under it"
    for candidate in decision.candidates:
        mark = "*" if candidate.is_chosen else " "
        numbers = (
            f"{name} {_number(getattr(candidate, name))}"
            for name in ("score", "mean", "width", "propensity", "headroom_ratio", "expected_success")
            if getattr(candidate, name) is not None
        )
        load = f"{candidate.n_running} running, {candidate.n_held} held"
        yield f"  {mark} {candidate.candidate}: {', '.join((*numbers, *_wait(candidate), load))}"
        for signal in candidate.signals:
            yield f"      {signal.name} = {_number(signal.value)}, {signal.age_s:.3f} s old"
    best = _better_scored(decision)
    if best is not None:
        yield f"    explored: {best} has the higher score"
    for model in decision.unaffordable:
        yield f"    {model}: left out, the budget of dollars per hour does not allow it now"


def _wait(candidate: CandidateExplained) -> Iterator[str]:
    """The forecast of its wait, with the ends of its 80 % interval where those were recorded."""
    if candidate.wait_s is None:
        return
    ends = (candidate.wait_low_s, candidate.wait_high_s)
    interval = "" if ends == (None, None) else f" ({_number(ends[0])} to {_number(ends[1])})"
    yield f"wait {_number(candidate.wait_s)} s{interval}"


def _better_scored(decision: DecisionExplained) -> str | None:
    """Who has a higher score than whom the policy chose: it explored. None where nobody has, or it was not free."""
    scores = {c.candidate: c.score for c in decision.candidates if c.score is not None}
    chosen = scores.get(decision.chosen)
    if decision.reason != "policy" or chosen is None:
        return None
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] - chosen > TIE_RATIO * max(1.0, abs(scores[best])) else None


def _from(decision: DecisionExplained) -> str:
    return "" if decision.routed is None else f" from {decision.routed}"


def _verdict_line(verdict: Verdict) -> str:
    score = f", score {_number(verdict.score)}" if verdict.score is not None else ""
    by = f" by {verdict.verifier}" if verdict.verifier else ""
    version = f" (version {verdict.version})" if verdict.version else ""
    took = f", {_number(verdict.took_s)} s" if verdict.took_s is not None else ""
    cost = f", ${_number(verdict.cost_usd)}" if verdict.cost_usd else ""
    correction = ", a correction" if verdict.is_correction else ""
    why = f": {verdict.explanation}" if verdict.explanation else ""
    lines = [f"verdict: {verdict.verdict}{score}{by}{version}{took}{cost}{correction}{why}"]
    lines += [f"    {name}: {text}" for name, text in verdict.evidence.items()]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
