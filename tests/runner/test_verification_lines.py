"""The lines of what is to be judged: bounded, retried, distrustful, and never a zero for an error of ours.

Time is virtual: verifiers sleep on a clock of the test's, so a minute costs nothing.
"""

import asyncio
import heapq
from functools import wraps

import pytest

from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.runner.config import VerificationConfig
from loadwise.runner.spool import Job
from loadwise.runner.verification import RECHECK_S, Assigned, Verification, checked_healths
from loadwise.settings import QuotaSpec
from loadwise.verify.case import Case
from loadwise.verify.check import Compute, Finding, FindingStatus
from loadwise.verify.verifier import STEPS_MAX, Wanted, abstained, failed, not_carried_out, passed


class Clock:
    """Virtual seconds: `advance` wakes whoever sleeps, in order."""

    def __init__(self):
        self.now_s = 0.0
        self._sleepers = []
        self._serial = 0

    def now(self):
        return self.now_s

    async def sleep(self, seconds):
        done = asyncio.get_running_loop().create_future()
        self._serial += 1
        heapq.heappush(self._sleepers, (self.now_s + seconds, self._serial, done))
        await done

    async def advance(self, seconds):
        ends_at_s = self.now_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= ends_at_s:
            self.now_s, _, done = heapq.heappop(self._sleepers)
            if not done.done():
                done.set_result(None)
            await settle()
        self.now_s = ends_at_s


async def settle():
    for _ in range(60):
        await asyncio.sleep(0)


class FakeCarrier:
    """Answers each check by a script: findings, exceptions, or seconds to sleep first."""

    def __init__(self, clock, *findings, sleeps_s=0.0):
        self.clock = clock
        self.findings = list(findings)
        self.sleeps_s = sleeps_s
        self.n_carried = 0
        self.n_at_once = self.most_at_once = 0

    async def carry(self, check):
        self.n_carried += 1
        self.n_at_once += 1
        self.most_at_once = max(self.most_at_once, self.n_at_once)
        try:
            if self.sleeps_s:
                await self.clock.sleep(self.sleeps_s)
            return self.findings.pop(0) if self.findings else Finding(value=True)
        finally:
            self.n_at_once -= 1

    async def on_thread(self, call):
        return call()


class Asks:
    """A verifier that asks one check, and passes where its value is true."""

    kind, version = "math", "7"

    def __init__(self, known=(None, None), verdicts=None):
        self._known = known

    def begin(self, case):
        return Wanted(check=Compute(function="f"), state={"n": 1})

    def resume(self, case, state, finding):
        trouble = not_carried_out(self, finding)
        if trouble is not None:
            return trouble
        return passed(self, "right", evidence={"log": "x"}) if finding.value else failed(self, "wrong")

    def known_pass(self):
        return self._known[0]

    def known_fail(self):
        return self._known[1]


class Site:
    """A verification on a virtual clock, and what it delivered."""

    def __init__(
        self,
        verifier,
        *findings,
        sleeps_s=0.0,
        quota=None,
        unwanted=(),
        known=(None, None),
        is_unchecked=True,
        **config,
    ):
        self.clock = Clock()
        self.carrier = FakeCarrier(self.clock, *findings, sleeps_s=sleeps_s)
        self.verdicts: dict[str, Verdict] = {}
        self.said: list[str] = []
        self.assigned = Assigned("t", verifier, quota=quota, known=known, is_unchecked=is_unchecked)
        self.verification = Verification(
            {"t": self.assigned},
            self.carrier,
            VerificationConfig(**config),
            deliver=self.deliver,
            is_wanted=lambda program_id: program_id not in unwanted,
            say=self.said.append,
            now_s=self.clock.now,
            sleep=self.clock.sleep,
        )

    def deliver(self, job, verdict):
        assert job.program_id not in self.verdicts, "judged twice"
        self.verdicts[job.program_id] = verdict

    def submit(self, *names, **more):
        for name in names:
            self.verification.submit(Job(program_id=name, task_type="t", case=Case(program_id=name), **more))


def on_loop(test):
    """Run on a loop, with a bound."""

    @wraps(test)
    def run():
        asyncio.run(asyncio.wait_for(test(), 120))

    return run


def trouble(status=FindingStatus.ERROR):
    return Finding(status=status, reason="the world is down", cost_usd=0.5)


@on_loop
async def test_a_verdict_tells_who_why_how_long_and_what_it_cost():
    """Evidence only where it is kept."""
    for keeps in (False, True):
        s = Site(Asks(), Finding(value=True, cost_usd=0.25), sleeps_s=3.0, keeps_evidence=keeps)
        s.verification.start()
        s.submit("p")
        await s.clock.advance(10.0)
        verdict = s.verdicts["p"]
        assert (verdict.verdict, verdict.verifier, verdict.version, verdict.explanation) == (
            "pass",
            "math",
            "7",
            "right",
        )
        assert (verdict.took_s, verdict.cost_usd) == (3.0, 0.25)
        assert verdict.evidence == ({"log": "x"} if keeps else {})
        await s.verification.close()


@pytest.mark.parametrize("status", [FindingStatus.ERROR, FindingStatus.TIMEOUT])
def test_what_fails_by_no_fault_of_the_program_is_tried_again(status):
    """Twice, the second wait twice as long; then it counts as if nothing had been."""

    @on_loop
    async def run():
        s = Site(Asks(), trouble(status), trouble(status), Finding(value=False), retries_max=2, retry_s=2.0)
        s.verification.start()
        s.submit("p")
        await s.clock.advance(5.9)
        assert s.verdicts == {}
        await s.clock.advance(0.2)
        assert s.verdicts["p"].verdict is VerdictKind.FAIL and s.verdicts["p"].cost_usd == 1.0
        assert s.verification.tally.n_retries == 2
        await s.verification.close()

    run()


@on_loop
async def test_an_error_that_stays_is_an_abstention_and_never_a_zero():
    """Retried as often as is allowed; a refusal is not retried at all."""
    s = Site(Asks(), *[trouble() for _ in range(9)], retries_max=2, retry_s=1.0)
    s.verification.start()
    s.submit("p")
    await s.clock.advance(10.0)
    assert s.verdicts["p"].verdict is VerdictKind.ABSTAIN and s.verdicts["p"].success is None
    assert s.carrier.n_carried == 3
    s.carrier.findings[:] = [trouble(FindingStatus.REFUSED)]
    s.submit("q")
    await s.clock.advance(1.0)
    assert s.verdicts["q"].verdict is VerdictKind.ABSTAIN and s.carrier.n_carried == 4
    await s.verification.close()


@on_loop
async def test_a_minute_of_sleep_holds_nobody_else_and_the_line_is_bounded():
    """Two at once, five wait, the eighth is abstained on at once; submitting takes no time at all."""
    s = Site(Asks(), sleeps_s=60.0, concurrency={"math": 2}, queue_max=5)
    s.verification.start()
    await settle()
    s.submit("a", "b")
    await settle()
    s.submit(*"cdefgh")
    assert s.clock.now_s == 0.0
    await settle()
    assert s.verification.depth() == {"math": (5, 2)}
    assert set(s.verdicts) == {"h"} and "which is the limit" in s.verdicts["h"].explanation
    await s.clock.advance(60.0)
    assert set(s.verdicts) == {"a", "b", "h"}
    await s.clock.advance(240.0)
    assert set(s.verdicts) == set("abcdefgh") and s.carrier.most_at_once == 2
    assert all(s.verdicts[name].verdict is VerdictKind.PASS for name in "abcdefg")
    await s.verification.close()


@on_loop
async def test_judging_one_program_is_bounded():
    """A verifier that never comes to an end: abstain, and the line goes on."""

    class Greedy(Asks):
        def resume(self, case, state, finding):
            return Wanted(check=Compute(function="f"))

    s = Site(Greedy())
    s.verification.start()
    s.submit("p")
    await settle()
    await s.clock.advance(1.0)
    for _ in range(20):
        await settle()
    assert f"more than {STEPS_MAX} checks" in s.verdicts["p"].explanation and s.carrier.n_carried == STEPS_MAX
    await s.verification.close()
    s = Site(Asks(), sleeps_s=1.0, program_max_s=0.01)  # the loop's own clock ends it
    s.verification.start()
    s.submit("p")
    await _until(lambda: s.verdicts)
    assert "took longer than 0.01 s" in s.verdicts["p"].explanation
    await s.verification.close()


async def _until(condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("method", ["begin", "resume"])
def test_a_verifier_that_raises_abstains(method):
    """A bug of a verifier teaches nobody anything."""

    class Raises(Asks):
        pass

    def bad(self, *arguments):
        raise RuntimeError("a bug\nwith \x00 lines")

    setattr(Raises, method, bad)

    @on_loop
    async def run():
        s = Site(Raises())
        s.verification.start()
        s.submit("p", "q")
        await s.clock.advance(1.0)
        for verdict in s.verdicts.values():
            assert verdict.verdict is VerdictKind.ABSTAIN and "RuntimeError" in verdict.explanation
            assert verdict.explanation.isprintable()
        assert len(s.verdicts) == 2
        await s.verification.close()

    run()


KNOWN = (Case(program_id="good"), Case(program_id="bad"))


class Knows(Asks):
    """Judges by the program's name, without a check."""

    def __init__(self, says):
        super().__init__(KNOWN)
        self.says = says

    def begin(self, case):
        kind = self.says.get(case.program_id, "pass")
        return {"pass": passed, "fail": failed, "abstain": abstained}[kind](self, "so")


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ({"good": "pass", "bad": "fail"}, ""),
        ({"good": "fail", "bad": "fail"}, "known pass was judged fail"),
        ({"good": "pass", "bad": "pass"}, "known fail was judged pass"),
        ({"good": "abstain", "bad": "fail"}, "known pass could not be judged"),
    ],
)
def test_known_cases_come_first(says, problem):
    """Jobs wait for them; a verifier that fails one abstains on everything and is announced."""

    @on_loop
    async def run():
        s = Site(Knows(says))
        s.verification.start()
        s.submit("p")
        await s.clock.advance(1.0)
        verdict = s.verdicts["p"]
        assert verdict.verdict is (VerdictKind.ABSTAIN if problem else VerdictKind.PASS)
        assert problem in verdict.explanation and bool(s.said) is bool(problem)
        healths = await checked_healths({"t": s.assigned}, s.carrier, s.verification.config)
        assert problem in healths["t"].problem and bool(healths["t"].problem) is bool(problem)
        await s.verification.close()

    run()


@on_loop
async def test_a_verifier_that_could_not_be_checked_is_checked_again():
    """Its service was down at start: abstain; a minute later it is asked again and trusted."""
    says = {"good": "abstain", "bad": "fail"}
    s = Site(Knows(says))
    s.verification.start()
    s.submit("early")
    await s.clock.advance(1.0)
    says["good"] = "pass"
    s.submit("soon")
    await s.clock.advance(RECHECK_S)
    s.submit("late")
    await s.clock.advance(1.0)
    kinds = {name: verdict.verdict.value for name, verdict in s.verdicts.items()}
    assert kinds == {"early": "abstain", "soon": "abstain", "late": "pass"}
    assert any("trusted now" in text for text in s.said)
    await s.verification.close()


@on_loop
async def test_known_cases_of_the_configuration_go_before_those_of_the_verifier():
    """The operator knows better what his verifier must tell apart."""
    s = Site(Knows({"good": "fail", "bad": "fail", "mine": "pass"}), known=(Case(program_id="mine"), None))
    s.verification.start()
    s.submit("p")
    await s.clock.advance(1.0)
    assert s.verdicts["p"].verdict is VerdictKind.PASS
    await s.verification.close()


@on_loop
async def test_a_verifier_without_known_cases_is_credited_on_the_operators_word_alone():
    """Else nothing shows that it judges rightly: it abstains, and names what is missing."""
    for is_unchecked in (False, True):
        s = Site(Asks(), Finding(value=True), is_unchecked=is_unchecked)
        s.verification.start()
        s.submit("p")
        await s.clock.advance(1.0)
        verdict = s.verdicts["p"]
        assert verdict.verdict is (VerdictKind.PASS if is_unchecked else VerdictKind.ABSTAIN)
        assert is_unchecked or "give task_types.t.known_pass and .known_fail" in verdict.explanation
        assert any("for want of known_pass and known_fail" in text for text in s.said)
        await s.verification.close()


@on_loop
async def test_quotas_hold_for_every_hour():
    """By number and by dollars; an hour later there is room again."""
    s = Site(Asks(), quota=QuotaSpec(programs_per_hour=2))
    s.verification.start()
    s.submit("a", "b", "c")
    await s.clock.advance(1.0)
    assert [v.verdict.value for v in s.verdicts.values()].count("abstain") == 1
    await s.clock.advance(3600.0)
    s.submit("d")
    await s.clock.advance(1.0)
    assert s.verdicts["d"].verdict is VerdictKind.PASS
    await s.verification.close()
    dear = [Finding(value=True, cost_usd=0.6) for _ in range(3)]
    s = Site(Asks(), *dear, quota=QuotaSpec(usd_per_hour=1.0), concurrency={"math": 1})
    s.verification.start()
    s.submit("a", "b", "c")
    await s.clock.advance(1.0)
    assert [s.verdicts[n].verdict.value for n in "abc"] == ["pass", "pass", "abstain"]
    assert "USD" in s.verdicts["c"].explanation
    await s.verification.close()


@on_loop
async def test_what_is_judged_already_or_cannot_be_is_not_judged():
    """Nothing is spent on it."""
    s = Site(Asks(), unwanted=("reported",))
    s.verification.start()
    s.submit("reported")
    s.submit("lost", lack="its case was lost")
    s.verification.submit(Job(program_id="other", task_type="absent", case=Case()))
    await s.clock.advance(1.0)
    assert s.carrier.n_carried == 0
    assert {name: v.verdict.value for name, v in s.verdicts.items()} == dict.fromkeys(
        ("reported", "lost", "other"), "abstain"
    )
    await s.verification.close()


@on_loop
async def test_stopping_delivers_nothing_more():
    """What has no verdict yet gets none; the spool has it."""
    s = Site(Asks(), sleeps_s=60.0)
    s.verification.start()
    s.submit("a", "b", "c")
    await settle()
    await s.verification.close()
    assert s.verdicts == {}


@on_loop
async def test_a_spooled_case_is_read_when_its_turn_comes():
    """The line holds names only; one that is lost meanwhile is an abstention."""
    s = Site(Knows({"good": "pass", "bad": "fail", "p": "fail"}))
    s.verification._load = lambda name: (
        Job(program_id="p", task_type="t", case=Case(program_id="p")) if name == "p" else None
    )
    s.verification.start()
    for name in ("p", "lost"):
        s.verification.submit(Job(program_id=name, task_type="t", case=Case(), is_spooled=True))
    await s.clock.advance(1.0)
    assert s.verdicts["p"].verdict is VerdictKind.FAIL
    assert "lost from the spool" in s.verdicts["lost"].explanation
    await s.verification.close()
