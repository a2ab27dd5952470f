"""Judges ended programs: asynchronous, bounded, off everybody's path.

Theory of operation. A job is put in the line of its verifier's kind; as many tasks as that kind may run at once take
jobs from it. A task asks the verifier what it wants to know, has the carrier find out, and hands the finding back
until there is a verdict. A check that fails by no fault of the program is retried; when that does not help the
verifier abstains, which teaches nobody anything: an error of ours is never a zero.

Before a verifier's verdicts count it must judge its known pass and its known fail rightly. That is done at start, in
the background; jobs wait for it. A verifier that fails it abstains on everything, and says so.

Bounds: jobs in line together, jobs at once by kind, checks of one job, seconds of one job, verdicts and dollars an
hour.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping

import msgspec

from loadwise.kernel.fact import Fact
from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.settings import QuotaSpec
from loadwise.verify.case import Case
from loadwise.verify.check import Check, Finding, FindingStatus
from loadwise.verify.fusion import Fusion
from loadwise.verify.verifier import STEPS_MAX, Verifier, Wanted

from .carry import Carrier
from .config import VerificationConfig
from .spool import Job

HOUR_S = 3600.0
RECHECK_S = 60.0
"""A verifier that could not be checked (its service is down) is tried again after so long, when it is needed."""

Deliver = Callable[[Job, Verdict], None]


class Health(Fact, frozen=True, kw_only=True):
    """What is known of a verifier."""

    is_checked: bool = False
    """It has judged its known cases, or has none."""
    problem: str = ""
    """Why its verdicts are not credited; empty where they are."""
    lacks: str = ""
    """The known cases that it has not; then nothing shows that it judges rightly."""
    note: str = ""


class Assigned:
    """The verifier of one task type, and what it has done lately.

    Args:
        known: a case that must pass and one that must fail; those of the verifier where None.
        is_unchecked: its verdicts are credited though it has no known cases: the operator's explicit word.
    """

    def __init__(
        self,
        task_type: str,
        verifier: Verifier,
        *,
        quota: QuotaSpec | None = None,
        known: tuple[Case | None, Case | None] = (None, None),
        is_unchecked: bool = False,
    ) -> None:
        self.task_type = task_type
        self.verifier = verifier
        self.quota = QuotaSpec() if quota is None else quota
        self.known = known
        self.is_unchecked = is_unchecked
        self.health = Health()
        self.checked_at_s = float("-inf")
        self.is_checked = asyncio.Event()
        self._spent: deque[tuple[float, float]] = deque()

    def known_cases(self) -> Iterator[tuple[Verifier, Case | None, VerdictKind]]:
        """Who must judge which case how; None for a case that nobody knows.

        A fusion ships none of its own: unless the operator gave both, each member is asked by its own.
        """
        is_whole = not isinstance(self.verifier, Fusion) or None not in self.known
        for case, wanted in zip(self.known, (VerdictKind.PASS, VerdictKind.FAIL), strict=True):
            if case is not None:
                yield self.verifier, case, wanted
            elif is_whole:
                yield self.verifier, _shipped(self.verifier, wanted), wanted
        if not is_whole:
            for member in _leaves(self.verifier):
                for wanted in (VerdictKind.PASS, VerdictKind.FAIL):
                    yield member, _shipped(member, wanted), wanted

    def overspent(self, now_s: float) -> str | None:
        """Which quota is used up; None where there is room for one more."""
        spent = self._spent
        while spent and spent[0][0] <= now_s - HOUR_S:
            spent.popleft()
        quota = self.quota
        if quota.programs_per_hour is not None and len(spent) >= quota.programs_per_hour:
            return f"{len(spent)} programs were judged within the hour; {quota.programs_per_hour} is the quota"
        cost_usd = sum(cost for _, cost in spent)
        if quota.usd_per_hour is not None and cost_usd >= quota.usd_per_hour:
            return f"{cost_usd:.4g} USD were spent within the hour; {quota.usd_per_hour:g} is the quota"
        return None

    def spend(self, now_s: float, cost_usd: float) -> None:
        """One more was judged."""
        if self.quota.programs_per_hour is not None or self.quota.usd_per_hour is not None:
            self._spent.append((now_s, cost_usd))


def _shipped(verifier: Verifier, wanted: VerdictKind) -> Case | None:
    return verifier.known_pass() if wanted is VerdictKind.PASS else verifier.known_fail()


def _leaves(verifier: Verifier) -> Iterator[Verifier]:
    """The verifiers that a fusion asks in the end."""
    if isinstance(verifier, Fusion):
        for member in verifier.members:
            yield from _leaves(member)
    else:
        yield verifier


class Tally:
    """What has been done, by kind of verifier."""

    def __init__(self) -> None:
        self.n_by_outcome: dict[tuple[str, str], int] = {}
        self.seconds_by_kind: dict[str, tuple[int, float]] = {}
        self.cost_usd_by_kind: dict[str, float] = {}
        self.n_retries = 0
        self.n_refused = 0
        """For want of room in the line."""

    def add(self, kind: str, verdict: Verdict) -> None:
        """Count a verdict."""
        key = (kind, verdict.verdict.value)
        self.n_by_outcome[key] = self.n_by_outcome.get(key, 0) + 1
        n, total_s = self.seconds_by_kind.get(kind, (0, 0.0))
        self.seconds_by_kind[kind] = (n + 1, total_s + (verdict.took_s or 0.0))
        self.cost_usd_by_kind[kind] = self.cost_usd_by_kind.get(kind, 0.0) + (verdict.cost_usd or 0.0)


class Verification:
    """The lines, and the tasks that work through them. Lives on one event loop.

    Args:
        assigned: by task type.
        deliver: is told every verdict, on the loop; called once a job unless we stop before.
        load: reads a spooled case, on a thread.
        is_wanted: whether a program still waits for its verdict; somebody may have reported one.
        say: for the operator: verifiers that are not to be trusted.
    """

    def __init__(
        self,
        assigned: Mapping[str, Assigned],
        carrier: Carrier,
        config: VerificationConfig,
        *,
        deliver: Deliver,
        load: Callable[[str], Job | None] = lambda program_id: None,
        is_wanted: Callable[[str], bool] = lambda program_id: True,
        say: Callable[[str], None] = lambda text: None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.assigned = dict(assigned)
        self.config = config
        self.tally = Tally()
        self.n_waiting = 0
        self._carrier = carrier
        self._deliver = deliver
        self._load = load
        self._is_wanted = is_wanted
        self._say = say
        self._now_s = now_s
        self._sleep = sleep
        self._line_by_kind: dict[str, asyncio.Queue[Job]] = {}
        self._n_running_by_kind: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Check every verifier in the background, and begin to judge."""
        for kind in {one.verifier.kind for one in self.assigned.values()}:
            self._line_by_kind[kind] = asyncio.Queue()
            self._n_running_by_kind[kind] = 0
            for _ in range(self.config.concurrency_of(kind)):
                self._begin(self._work(kind))
        for one in self.assigned.values():
            self._begin(self._check_first(one))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, job: Job) -> None:
        """Take a job; where there is no room, or nobody to judge it, the verdict is an abstention, soon."""
        one = self.assigned.get(job.task_type)
        if one is None:
            verdict = _abstained("", "", f"no verifier is configured for task type {job.task_type!r}")
        elif job.lack:
            verdict = _abstained(one.verifier.kind, one.verifier.version, job.lack)
        elif self.n_waiting >= self.config.queue_max:
            self.tally.n_refused += 1
            text = f"{self.n_waiting} programs wait to be judged, which is the limit"
            verdict = _abstained(one.verifier.kind, one.verifier.version, text)
        else:
            self.n_waiting += 1
            self._line_by_kind[one.verifier.kind].put_nowait(job)
            return
        asyncio.get_running_loop().call_soon(self._hand_over, job, verdict)

    def _hand_over(self, job: Job, verdict: Verdict) -> None:
        self.tally.add(verdict.verifier, verdict)
        self._deliver(job, verdict)

    def depth(self) -> dict[str, tuple[int, int]]:
        """Jobs in line and jobs at work, by kind."""
        return {kind: (line.qsize(), self._n_running_by_kind[kind]) for kind, line in self._line_by_kind.items()}

    async def close(self) -> None:
        """Stop; what has no verdict yet gets none."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- one job after another ---

    async def _work(self, kind: str) -> None:
        line = self._line_by_kind[kind]
        while True:
            job = await line.get()
            self.n_waiting -= 1
            self._n_running_by_kind[kind] += 1
            try:
                await self._do(job)
            except Exception as problem:  # a bug of ours must not end the line
                loop = asyncio.get_running_loop()
                loop.call_exception_handler({"message": "a verdict could not be delivered", "exception": problem})
            finally:
                self._n_running_by_kind[kind] -= 1

    async def _do(self, job: Job) -> None:
        one = self.assigned[job.task_type]
        await self._checked(one)
        verifier = one.verifier
        if not self._is_wanted(job.program_id):
            self._deliver(job, _abstained(verifier.kind, verifier.version, "it is judged already"))
            return
        spent = one.overspent(self._now_s())
        if one.health.problem:
            text = f"the verifier is not trusted: {one.health.problem}"
            verdict = _abstained(verifier.kind, verifier.version, text)
        elif spent is not None:
            verdict = _abstained(verifier.kind, verifier.version, f"the quota is used up: {spent}")
        elif (case := await self._case(job)) is None:
            verdict = _abstained(verifier.kind, verifier.version, "its case was lost from the spool")
        else:
            verdict = await self.judge(verifier, case)
            one.spend(self._now_s(), verdict.cost_usd or 0.0)
        if not self.config.keeps_evidence:
            verdict = msgspec.structs.replace(verdict, evidence={})
        self._hand_over(job, verdict)

    async def _case(self, job: Job) -> Case | None:
        if not job.is_spooled:
            return job.case
        found = await self._carrier.on_thread(lambda: self._load(job.program_id))
        return None if found is None else found.case

    async def judge(self, verifier: Verifier, case: Case) -> Verdict:
        """Judge one case, whatever it takes within the bounds; never raises for what the case or the world does."""
        began_at_s, costs = self._now_s(), [0.0]
        try:
            async with asyncio.timeout(self.config.program_max_s):
                verdict = await self._steps(verifier, msgspec.structs.replace(case, nonce=secrets.token_hex(16)), costs)
        except TimeoutError:
            text = f"judging took longer than {self.config.program_max_s:g} s"
            verdict = _abstained(verifier.kind, verifier.version, text)
        except Exception as error:
            verdict = _abstained(
                verifier.kind, verifier.version, f"the verifier raised {type(error).__name__}: {error}"
            )
        return msgspec.structs.replace(verdict, took_s=self._now_s() - began_at_s, cost_usd=costs[0])

    async def _steps(self, verifier: Verifier, case: Case, costs: list[float]) -> Verdict:
        step = await self._carrier.on_thread(lambda: verifier.begin(case))
        for _ in range(STEPS_MAX):
            if not isinstance(step, Wanted):
                return step
            finding = await self._find(step.check, costs)
            state = step.state

            def go_on(finding: Finding = finding, state: dict[str, object] = state) -> Verdict | Wanted:
                return verifier.resume(case, state, finding)

            step = await self._carrier.on_thread(go_on)
        return _abstained(verifier.kind, verifier.version, f"the verifier wanted more than {STEPS_MAX} checks")

    async def _find(self, check: Check, costs: list[float]) -> Finding:
        """Carry a check out, again where that failed by no fault of the program."""
        wait_s = self.config.retry_s
        for n_left in range(self.config.retries_max, -1, -1):
            finding = await self._carrier.carry(check)
            costs[0] += finding.cost_usd
            if finding.status not in (FindingStatus.ERROR, FindingStatus.TIMEOUT) or n_left == 0:
                break
            self.tally.n_retries += 1
            await self._sleep(wait_s)
            wait_s *= 2
        return finding

    # --- known cases ---

    async def _check_first(self, one: Assigned) -> None:
        one.health = await self.self_check(one)
        one.checked_at_s = self._now_s()
        one.is_checked.set()
        if one.health.problem:
            self._say(
                f"task type {one.task_type!r}: verifier {one.verifier.kind!r} is NOT trusted and its verdicts are not "
                f"credited: {one.health.problem}"
            )
        elif one.health.note:
            self._say(f"task type {one.task_type!r}: {one.health.note}")

    async def _checked(self, one: Assigned) -> None:
        await one.is_checked.wait()
        if one.health.problem and not one.health.is_checked and self._now_s() - one.checked_at_s >= RECHECK_S:
            one.checked_at_s = self._now_s()
            health = await self.self_check(one)
            if not health.problem:
                self._say(f"task type {one.task_type!r}: verifier {one.verifier.kind!r} is trusted now")
            one.health = health

    async def self_check(self, one: Assigned) -> Health:
        """Have a verifier judge its known cases."""
        lacking: list[str] = []
        for verifier, case, wanted in one.known_cases():
            of_member = "" if verifier is one.verifier else f" of member {verifier.kind!r}"
            if case is None:
                lacking.append(f"known_{wanted.value}{of_member}")
                continue
            verdict = await self.judge(verifier, case)
            if verdict.verdict is VerdictKind.ABSTAIN:
                problem = f"its known {wanted.value}{of_member} could not be judged: {verdict.explanation}"
                return Health(problem=problem)
            if verdict.verdict is not wanted:
                problem = (
                    f"its known {wanted.value}{of_member} was judged {verdict.verdict.value}: {verdict.explanation}"
                )
                return Health(is_checked=True, problem=problem)
        return _health_without(" and ".join(lacking), one)


def _health_without(lacks: str, one: Assigned) -> Health:
    """What is known of a verifier that judges rightly what it has of known cases."""
    if not lacks:
        return Health(is_checked=True)
    if one.is_unchecked:
        text = f"verifier {one.verifier.kind!r} is not checked for want of {lacks}; credited on your word (unchecked)"
        return Health(is_checked=True, lacks=lacks, note=text)
    where = f"task_types.{one.task_type}"
    problem = f"it is not checked for want of {lacks}: give {where}.known_pass and .known_fail, or say unchecked: true"
    return Health(is_checked=True, lacks=lacks, problem=problem)


EXPLANATION_MAX_CHARS = 500


def _abstained(kind: str, version: str, why: str) -> Verdict:
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in why[:EXPLANATION_MAX_CHARS])
    return Verdict(verdict=VerdictKind.ABSTAIN, verifier=kind, version=version, explanation=text)


async def checked_healths(
    assigned: Mapping[str, Assigned], carrier: Carrier, config: VerificationConfig
) -> dict[str, Health]:
    """The known cases of all verifiers, once: what `doctor` shows."""
    verification = Verification(assigned, carrier, config, deliver=lambda job, verdict: None)
    return {name: await verification.self_check(one) for name, one in assigned.items()}
