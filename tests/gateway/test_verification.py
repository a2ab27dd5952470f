"""Verifiers run by a real gateway: from a finish with artefacts to a credit, and everything that may come between."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engines import Call, Engine, message, says
from judged_site import TYPED, answered, closed, exact
from sites import on_loop, site, until

from loadwise.cli.main import main
from loadwise.gateway import judging
from loadwise.journal.audit import audit
from loadwise.journal.explain import why
from loadwise.journal.explanation_text import render_why
from loadwise.journal.parity import replay
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import ProgramState, VerdictKind
from loadwise.settings import parse_config


@on_loop
async def test_a_finished_program_is_judged_credited_and_explained() -> None:
    """References come with the finish; the verdict names verifier, version, seconds and why."""
    async with site(Engine(says(message("42"))), task_types=exact()) as s:
        for program_id, reference, wanted in (("right", "42", "pass"), ("wrong", "41", "fail")):
            await answered(s, program_id)
            assert (await s.finish(program_id, {"references": {"reference": reference}})).status == 200
            program = await closed(s, program_id)
            assert program.verdict.verdict == wanted and program.is_credited
            assert program.verdict.verifier == "exact" and program.verdict.version and program.verdict.explanation
            assert program.verdict.took_s is not None and program.verdict.cost_usd == 0.0
        told = (await s.ask("GET", "/v1/programs/wrong")).json
        assert told["verdict"]["explanation"] and "evidence" not in told["verdict"]
        assert "evidence" in (await s.ask("GET", "/v1/programs/wrong?evidence=true")).json["verdict"]
        page = (await s.ask("GET", "/metrics")).body.decode()
        assert 'loadwise_verifications_total{kind="exact",verdict="pass"} 1.0' in page
        assert 'loadwise_verifier_trusted{task_type="sum"} 1.0' in page
        assert 'loadwise_verifications_open{kind="exact",state="waiting"} 0.0' in page


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_last_text_is_what_is_judged_streamed_or_not(is_stream: bool) -> None:
    """A reply without text, a tool call, does not hide the answer before it; the reference may be metadata."""

    @on_loop
    async def run() -> None:
        replies = iter([message("41"), message("42"), message(None)])

        async def behave(call: Call) -> None:
            await says(next(replies))(call)

        async with site(Engine(behave), task_types=exact()) as s:
            for _ in range(3):
                await answered(s, "p", stream=is_stream, metadata={"reference": "42"})
            await s.finish("p")
            assert (await closed(s, "p")).verdict.verdict == "pass"

    run()


@on_loop
async def test_a_final_turn_and_an_idle_end_are_judged_too() -> None:
    """However a program ends, its verifier is asked."""
    types = exact(references={"reference": "42"})
    async with site(Engine(says(message("42"))), task_types=types, router={"idle_s": 0.05, "park_s": 0.05}) as s:
        await answered(s, "final", headers={**TYPED, "X-Loadwise-Final": "1"})
        assert (await closed(s, "final")).verdict.verdict == "pass"
        await answered(s, "idle")
        assert (await closed(s, "idle")).end_reason == "idle"


@on_loop
async def test_programs_that_nobody_here_judges_leave_nothing_behind() -> None:
    """Neither of another task type, nor refused, nor cancelled."""
    async with site(Engine(says(message("42"))), task_types={**exact(), "free": {}}) as s:
        intake = s.gateway.judging.intake
        await answered(s, "free", headers={"X-Loadwise-Task-Type": "free"})
        await answered(s, "none", headers={})
        assert len(intake) == 0
        await answered(s, "kept")
        assert len(intake) == 1 and intake.n_bytes > 0
        await s.finish("kept", {"references": {"reference": "42"}})
        await closed(s, "kept")
        assert len(intake) == 0 and intake.n_bytes == 0


@on_loop
async def test_texts_of_programs_that_ended_otherwise_are_swept_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict from outside ends a program: what was kept for its verifier goes when others come."""
    monkeypatch.setattr("loadwise.gateway.intake.GRACE_S", 0.0)
    async with site(Engine(says(message("42"))), task_types=exact()) as s:
        await answered(s, "judged")
        await s.verdict("judged")
        await answered(s, "a")
        assert set(s.gateway.judging.intake._kept) == {"a"}


@on_loop
async def test_an_answer_of_ten_megabytes_is_an_abstention_that_says_why() -> None:
    """It is not kept, it is not credited, and nobody waits."""
    long = says(message("4" * 10_000_000))
    async with site(Engine(long), task_types=exact(references={"reference": "42"})) as s:
        await answered(s, "p")
        await s.finish("p")
        program = await closed(s, "p")
        assert program.verdict.verdict == "abstain" and "10000000 characters" in program.verdict.explanation
        assert not program.is_credited and program.state is ProgramState.CLOSED


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("[" * 100_000, "fail"), ("\x00\x01\ufffd" * 1000, "fail"), ("(" * 5000 + ")" * 4999, "fail"), ("", "fail")],
)
def test_hostile_answers_are_judged_like_any_other(text: str, wanted: str) -> None:
    """10⁵ brackets, control characters, nothing at all: a fail with its reason, never an error."""

    @on_loop
    async def run() -> None:
        async with site(Engine(says(message(text))), task_types=exact(references={"reference": "42"})) as s:
            await answered(s, "p")
            await s.finish("p")
            verdict = (await closed(s, "p")).verdict
            assert verdict.verdict == wanted and verdict.explanation and verdict.explanation.isprintable()

    run()


@on_loop
async def test_an_answer_that_is_no_text_is_an_abstention() -> None:
    """An engine's answer of another shape, passed on all the same."""

    async def behave(call: Call) -> None:
        await call.respond({"choices": [{"message": {"content": {"not": "a text"}}}], "usage": {"prompt_tokens": 1}})

    async with site(Engine(behave), task_types=exact(references={"reference": "42"})) as s:
        await answered(s, "p")
        await s.finish("p")
        assert (await closed(s, "p")).verdict.verdict in ("abstain", "fail")


@on_loop
async def test_a_verifier_that_judges_its_known_cases_wrongly_is_announced_and_not_credited() -> None:
    """It abstains on everything, and the metrics say that it is not trusted."""
    wrong = exact(references={"reference": "42"}, known_pass={"answer": "41", "references": {"reference": "42"}})
    async with site(Engine(says(message("42"))), task_types=wrong) as s:
        await answered(s, "p")
        await s.finish("p")
        program = await closed(s, "p")
        assert program.verdict.verdict == "abstain" and "known pass was judged fail" in program.verdict.explanation
        assert not program.is_credited
        assert any("NOT trusted" in text for text in s.said)
        page = (await s.ask("GET", "/metrics")).body.decode()
        assert 'loadwise_verifier_trusted{task_type="sum"} 0.0' in page


@on_loop
async def test_known_error_rates_are_taken_out_of_the_reward() -> None:
    """(1 - 0.1) / (1 - 0.1 - 0.3) = 1.5 for a pass, -1/6 for a fail; a person is taken at his word."""
    types = exact(references={"reference": "42"}, false_pass=0.1, false_fail=0.3)
    replies = iter([message("42"), message("41"), message("41")])

    async def behave(call: Call) -> None:
        await says(next(replies))(call)

    async with site(Engine(behave), task_types=types) as s:
        for program_id in ("pass", "fail"):
            await answered(s, program_id)
            await s.finish(program_id)
            await closed(s, program_id)
        assert s.program("pass").reward == pytest.approx(1.5)  # type: ignore[union-attr]
        assert s.program("fail").reward == pytest.approx(-1 / 6)  # type: ignore[union-attr]
        await answered(s, "human")
        await s.verdict("human", {"verdict": "fail", "verifier": "human"})
        assert s.program("human").reward == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("rates", [{"false_pass": 0.5, "false_fail": 0.3}, {"false_pass": -0.1}, {"false_fail": 2.0}])
def test_error_rates_that_leave_no_signal_are_refused(rates: dict[str, float]) -> None:
    """Their sum must stay below 0.8; the message names the key."""
    with pytest.raises(ConfigError, match="false_"):
        parse_config({"models": {"m": {}}, "task_types": exact(**rates)})


@on_loop
async def test_a_person_corrects_a_machine_and_the_credit_follows(tmp_path: Path) -> None:
    """One credit is in force; both verdicts are in the journal, replay agrees, and why tells both."""
    async with site(
        Engine(says(message("41"))), journal=tmp_path, task_types=exact(references={"reference": "42"})
    ) as s:
        await answered(s, "p")
        await s.finish("p")
        assert (await closed(s, "p")).reward == 0.0
        again = await s.verdict("p", {"verdict": "pass", "verifier": "other"})
        assert again.status == 409 and again.error["code"] == "verdict_conflict"
        body = {"verdict": "pass", "verifier": "human", "explanation": "41 is right: six by seven less one"}
        assert (await s.verdict("p", body)).json == {"program": "p", "credited": True, "decision": 1}
        assert (await s.verdict("p", body)).json == {"program": "p", "credited": True, "decision": 1}
        assert s.program("p").reward == 1.0 and s.counts.verdicts_corrected == 1  # type: ignore[union-attr]
        assert s.router.credit.n_landed == 1
        taken_back = {"verdict": "abstain", "verifier": "audit", "correction": True}
        assert (await s.verdict("p", taken_back)).json["credited"] is False
        assert s.router.credit.n_landed == 0 and s.counts.verdicts_corrected == 2
    assert replay(tmp_path).holds
    text = render_why(why(tmp_path, "p"))
    assert "by exact" in text and "by human" in text and "41 is right" in text and "corrected" in text


@on_loop
async def test_an_audited_sample_tells_how_often_a_verifier_is_wrong(tmp_path: Path) -> None:
    """Persons judge beside the machine, where it was right too; rates with their intervals, and from the command."""
    replies = {"a": "42", "b": "41", "c": "42", "d": "41"}
    truth = {"a": "pass", "b": "pass", "c": "fail", "d": "fail"}

    async def behave(call: Call) -> None:
        await says(message(replies[call.json["messages"][0]["content"]]))(call)

    types = exact(references={"reference": "42"})
    async with site(Engine(behave), journal=tmp_path, task_types=types) as s:
        for program_id, verdict in truth.items():
            await s.chat(program_id, program_id, headers=TYPED)
            await s.finish(program_id)
            await closed(s, program_id)
            assert (await s.verdict(program_id, {"verdict": verdict, "verifier": "human"})).status == 200
    (found,) = audit(tmp_path)
    assert (found.task_type, found.verifier, found.n_right, found.n_wrong) == ("sum", "exact", 2, 2)
    assert (found.false_pass, found.false_fail) == (0.5, 0.5)
    assert found.false_pass_ci95[0] < 0.5 < found.false_pass_ci95[1]
    assert main(["journal", "audit", str(tmp_path)]) == 0
    assert main(["journal", "audit", str(tmp_path), "--json"]) == 0


@on_loop
async def test_a_program_that_has_left_memory_is_corrected_no_more(tmp_path: Path) -> None:
    """409 with its own code; the same verdict again is still answered as before."""
    async with site(Engine(), journal=tmp_path, router={"closed_max": 1}) as s:
        for program_id in ("a", "b"):
            await s.chat(program_id)
            assert (await s.verdict(program_id)).status == 200
        await until(lambda: s.program("a") is None)
        late = await s.verdict("a", {"verdict": "fail", "correction": True})
        assert late.status == 409 and late.error["code"] == "verdict_final"
        assert (await s.verdict("a")).json["credited"] is True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("correction", "yes"),
        ("seconds", -1),
        ("seconds", True),
        ("cost_usd", float("inf")),
        ("evidence", ["a"]),
        ("evidence", {"a": 1}),
        ("evidence", {"a": "x" * 20_000}),
        ("explanation", "x" * 3000),
        ("explanation", 7),
    ],
)
def test_a_report_that_is_out_of_range_is_refused(field: str, value: Any) -> None:
    """422 that names the field."""

    @on_loop
    async def run() -> None:
        async with site(Engine()) as s:
            await s.chat("p")
            answer = await s.verdict("p", json.dumps({"verdict": "pass", field: value}).encode())
            assert answer.status == 422 and answer.error["param"] == field
            assert (await s.verdict("p", {"verdict": "pass", "seconds": 1, "evidence": {"log": "ok"}})).status == 200

    run()


@on_loop
async def test_turns_go_on_while_verifiers_are_busy_and_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers that do not end: finishes and turns are answered all the same; one too many is abstained on."""
    release = asyncio.Event()

    async def never(self: Any, verifier: Any, case: Any) -> Any:
        await release.wait()
        raise AssertionError("not released")

    verification = {"queue_max": 3, "concurrency": {"exact": 2}}
    async with site(Engine(says(message("42"))), task_types=exact(), verification=verification) as s:
        judge = s.gateway.judging
        await until(lambda: judge.verification.assigned["sum"].is_checked.is_set())
        monkeypatch.setattr("loadwise.runner.verification.Verification.judge", never)
        for n in range(6):
            await answered(s, f"p{n}")
            assert (await s.finish(f"p{n}")).status == 200
        refused = await closed(s, "p5")
        assert refused.verdict.verdict == "abstain" and "which is the limit" in refused.verdict.explanation
        assert judge.verification.depth() == {"exact": (3, 2)}
        assert (await s.chat("other")).status == 200
        reported = await s.verdict("p0")
        assert reported.json["credited"] is True


@on_loop
async def test_a_webhook_that_is_down_is_tried_again_and_never_a_zero() -> None:
    """Its service answers 500: abstain, with the reason; the learner hears nothing."""

    async def behave(call: Call) -> None:
        await call.respond(b"{}", status=500)

    service = await Engine(behave).start()
    known = {"known_pass": {"answer": "a"}, "known_fail": {"answer": "b"}}
    types = {"sum": {"verifier": {"kind": "webhook", "url": f"{service.url}/judge", "options": known}}}
    verification = {"retry_s": 0.001, "retries_max": 1}
    async with site(Engine(), task_types=types, verification=verification) as s:
        await answered(s, "p")
        await s.finish("p")
        program = await closed(s, "p")
        assert program.verdict.verdict == "abstain" and "500" in program.verdict.explanation
        assert not program.is_credited and s.gateway.judging.verification.tally.n_retries > 0


@on_loop
async def test_what_waits_to_be_judged_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finish is acknowledged when its case is on disk; the next run judges it, and the case is gone."""
    types = exact(references={"reference": "42"})
    with monkeypatch.context() as patch:
        patch.setattr("loadwise.runner.verification.Verification.submit", lambda self, job: None)
        async with site(Engine(says(message("42"))), journal=tmp_path, task_types=types) as s:
            await answered(s, "p")
            assert (await s.finish("p", {"artefacts": {"note": "half a pair"}})).status == 200
            assert len(list((tmp_path / judging.SPOOL_NAME).glob("*.case"))) == 1
            assert s.program("p").state is ProgramState.VERIFYING  # type: ignore[union-attr]
    async with site(Engine(says(message("42"))), journal=tmp_path, task_types=types) as s:
        program = await closed(s, "p")
        assert program.verdict.verdict is VerdictKind.PASS and program.is_credited
        await until(lambda: not list((tmp_path / judging.SPOOL_NAME).glob("*.case")))
        assert any("judged again" in text for text in s.said)
    assert b"half a pair" not in b"".join(p.read_bytes() for p in tmp_path.glob("*.journal"))


@on_loop
async def test_a_case_that_was_lost_is_an_abstention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has emptied the spool, or it was full."""
    types = exact(references={"reference": "42"})
    with monkeypatch.context() as patch:
        patch.setattr("loadwise.runner.verification.Verification.submit", lambda self, job: None)
        verification = {"spool_max_bytes": 1}
        async with site(
            Engine(says(message("42"))), journal=tmp_path, task_types=types, verification=verification
        ) as s:
            await answered(s, "p")
            await s.finish("p")
            assert any("would not survive a restart" in text for text in s.said)
    async with site(Engine(), journal=tmp_path, task_types=types) as s:
        program = await closed(s, "p")
        assert program.verdict.verdict == "abstain" and "not kept" in program.verdict.explanation


@on_loop
async def test_a_task_type_that_has_left_the_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs of an earlier run are abstained on."""
    with monkeypatch.context() as patch:
        patch.setattr("loadwise.runner.verification.Verification.submit", lambda self, job: None)
        async with site(Engine(), journal=tmp_path, task_types=exact()) as s:
            await answered(s, "p")
            await s.finish("p")
    async with site(Engine(), journal=tmp_path) as s:
        assert "no verifier is configured" in (await closed(s, "p")).verdict.explanation


@on_loop
async def test_quotas_are_kept_by_abstaining() -> None:
    """Two an hour: the third is abstained on, and says so."""
    types = exact(references={"reference": "42"}, quota={"programs_per_hour": 2})
    async with site(Engine(says(message("42"))), task_types=types) as s:
        verdicts = []
        for n in range(3):
            await answered(s, f"p{n}")
            await s.finish(f"p{n}")
            verdicts.append((await closed(s, f"p{n}")).verdict)
        assert [v.verdict.value for v in verdicts] == ["pass", "pass", "abstain"]
        assert "2 is the quota" in verdicts[2].explanation


@on_loop
async def test_limits_instead_of_a_sandbox_are_announced_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where there is no sandbox at all, code is refused: an abstention, said at start."""
    types = {"sum": {"verifier": {"kind": "code"}, "references": {"tests": "assert f() == 1"}}}
    async with site(Engine(), task_types=types, verification={"sandbox": "limits"}) as s:
        assert any(text.startswith("WARNING") and "ONLY" in text for text in s.said)
    async with site(
        Engine(says(message("def f(): return 1"))), task_types=types, verification={"sandbox": "none"}
    ) as s:
        assert any("untrusted code is refused" in text for text in s.said)
        await answered(s, "p")
        await s.finish("p")
        assert (await closed(s, "p")).verdict.verdict == "abstain"


@pytest.mark.parametrize(
    ("verification", "named"),
    [
        ({"sandbox": "chroot"}, "sandbox"),
        ({"concurrency": {"exam": 1}}, "exam"),
        ({"concurrency": {"code": 0}}, "concurrency"),
        ({"retries_max": 99}, "retries_max"),
        ({"retry_s": 0}, "retry_s"),
        ({"queue_max": 0}, "queue_max"),
        ({"shows": ["/etc"]}, "shows"),
        ({"shows": ["/opt/../root"]}, "shows"),
        ({"quota": 1}, "unknown key"),
    ],
)
def test_a_wrong_verification_section_is_refused_by_name(verification: dict[str, Any], named: str) -> None:
    """At start, not when the first program ends."""
    config = parse_config({"models": {"m": {}}, "verification": verification})
    with pytest.raises(ConfigError, match=named):
        judging.verification_config(config)


@on_loop
async def test_cases_that_wait_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a journal there is no spool: what finds no room is abstained on, and room comes back."""
    verification = {"kept_max_bytes": 2000}
    types = exact(references={"reference": "42"})
    async with site(Engine(says(message("42" * 700))), task_types=types, verification=verification) as s:
        await until(lambda: s.gateway.judging.verification.assigned["sum"].is_checked.is_set())
        with monkeypatch.context() as patch:
            patch.setattr("loadwise.runner.verification.Verification.submit", lambda self, job: jobs.append(job))
            jobs: list[Any] = []
            for program_id in ("a", "b"):
                await answered(s, program_id)
                await s.finish(program_id)
        assert [bool(job.lack) for job in jobs] == [False, True] and "which is the limit" in jobs[1].lack
        for job in jobs:
            s.gateway.judging.verification.submit(job)
        assert (await closed(s, "a")).verdict.verdict == "fail"
        assert (await closed(s, "b")).verdict.verdict == "abstain"
        assert s.gateway.judging._held_bytes == {}
