"""From the router's `Verify` to a verdict: the case is written down, judged by the runner, and told to the router.

Theory of operation. While a program is open the intake keeps what was asked and answered. When the router says
`Verify` the case is made of that, handed to the spool (a file, on a thread of its own) and put in line. The verdict
comes back as an event like any client's; once it is on disk the spooled case is removed. After a restart every
program that the router still waits for is judged again, from the spool. A program whose case was lost is abstained
on, and says why.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import ConfigError, Error
from loadwise.kernel.ids import ProgramId
from loadwise.kernel.work import Verdict
from loadwise.router.lifecycle import REPORTED
from loadwise.runner.carry import Carrier
from loadwise.runner.config import VerificationConfig
from loadwise.runner.containers import find_engine
from loadwise.runner.sandbox import Bubblewrap, LimitsOnly, NoSandbox, Sandbox, open_sandbox
from loadwise.runner.spool import Job, Spool
from loadwise.runner.verification import Assigned, Verification
from loadwise.settings import Config, TaskTypeSpec, convert
from loadwise.verify.case import Case
from loadwise.verify.fusion import fused
from loadwise.verify.registry import make_verifier
from loadwise.verify.spec import VerifierSpec

from .host import Host
from .intake import Intake, Kept
from .openai import ModelRequest
from .programs import WhenDurable

SPOOL_NAME = "unjudged"
"""Directory of the spool, inside the journal's."""
SANDBOXED_KINDS = frozenset({"code", "patch"})

Say = Callable[[str], None]


def verification_config(config: Config) -> VerificationConfig:
    """The `verification:` part of a pool file, checked."""
    return convert(config.verification, VerificationConfig, where="verification")


def assign(config: Config) -> dict[str, Assigned]:
    """The verifiers that are run here, by task type.

    Raises:
        ConfigError: an option of one is wrong; the message names its task type.
    """
    assigned = {}
    for name, spec in config.run_task_types.items():
        try:
            verifier = make_verifier(spec.verifier)
        except ConfigError as error:
            raise ConfigError(f"task_types: {name}: verifier: {error.message}") from error
        known = (_referenced(spec.known_pass, spec), _referenced(spec.known_fail, spec))
        assigned[name] = Assigned(name, verifier, quota=spec.quota, known=known, is_unchecked=spec.unchecked)
    return assigned


def _referenced(case: Case | None, spec: TaskTypeSpec) -> Case | None:
    """A known case with the references of its task type below its own."""
    if case is None or not spec.references:
        return case
    return msgspec.structs.replace(case, references={**spec.references, **case.references})


def needs_sandbox(spec: VerifierSpec) -> bool:
    """Whether the verifier, or one that it fuses, runs code that nobody vouches for."""
    return spec.kind in SANDBOXED_KINDS or (spec.kind == "fusion" and any(map(needs_sandbox, fused(spec))))


def make_carrier(config: Config, verification: VerificationConfig, say: Say) -> Carrier:
    """What carries out checks; says, loudly, where untrusted code is not contained, or cannot be run."""
    sandbox: Sandbox | None = None
    needing = [name for name, spec in config.run_task_types.items() if needs_sandbox(spec.verifier)]
    if needing:
        sandbox = open_sandbox(verification.sandbox, verification.shows)
        if isinstance(sandbox, LimitsOnly):
            say(f"WARNING: {LimitsOnly.WARNING}")
        elif isinstance(sandbox, NoSandbox):
            say(f"untrusted code is refused ({', '.join(needing)}): {sandbox.reason}")
        else:
            assert isinstance(sandbox, Bubblewrap)
    hidden = frozenset(spec.key_env for spec in config.backends if spec.key_env is not None)
    return Carrier(sandbox=sandbox, containers=find_engine(verification.container_engine), hidden=hidden)


def _light(job: Job) -> Job:
    """The job without its case, which is in the spool."""
    return Job(program_id=job.program_id, task_type=job.task_type, case=Case(), is_spooled=True)


class Judging:
    """Joins router, intake, spool and runner.

    Args:
        folder: of the journal; None where nothing survives a restart.
        when_durable: calls back on the loop once all that was posted so far is on disk.
    """

    def __init__(
        self,
        host: Host,
        task_types: Mapping[str, TaskTypeSpec],
        assigned: Mapping[str, Assigned],
        carrier: Carrier,
        config: VerificationConfig,
        *,
        folder: Path | None,
        when_durable: WhenDurable,
        say: Say,
    ) -> None:
        self._host = host
        self._task_types = task_types
        self.carrier = carrier
        self._when_durable = when_durable
        self._say = say
        self.intake = Intake(config)
        self.spool = None if folder is None else Spool(folder / SPOOL_NAME, max_bytes=config.spool_max_bytes)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._is_closed = False
        self._writing: dict[ProgramId, list[Callable[[], None]]] = {}
        """Programs whose case is on its way to the disk, and who waits for that."""
        self._is_spool_broken = False
        self._held_max_bytes = config.kept_max_bytes
        self._held_bytes: dict[ProgramId, int] = {}
        """Cases that wait in memory, for want of a spool or of room in it."""
        self.verification = Verification(
            assigned,
            carrier,
            config,
            deliver=self._deliver,
            load=self._load,
            is_wanted=self._is_wanted,
            say=say,
        )
        host.on_verify = self.verify

    # --- while programs run ---

    def is_kept(self, program_id: ProgramId) -> bool:
        """Whether a program's answers are to be kept: nothing is where nobody will ask."""
        program = self._host.router.table.by_id.get(program_id)
        return program is not None and program.verifier not in REPORTED and program_id in self.intake

    def note_turn(self, program_id: ProgramId, request: ModelRequest) -> None:
        """A turn comes in: of a program's first request, or the first that is heard of it since a restart, the text is
        kept, unless it is known that nobody here will judge it."""
        program = self._host.router.table.by_id.get(program_id)
        if program_id in self.intake or (program is not None and program.verifier in REPORTED):
            return
        self.intake.sweep(self._is_open, self._host.now_s())
        text, references = request.prompt_text(), request.metadata.references()
        self.intake.note_prompt(program_id, text, references, self._host.now_s())

    def _is_open(self, program_id: ProgramId) -> bool:
        program = self._host.router.table.by_id.get(program_id)
        return program is not None and program.is_open

    def forget_unrun(self, program_id: ProgramId) -> None:
        """Its first answer came and it is known who judges it: drop what nobody will need."""
        program = self._host.router.table.by_id.get(program_id)
        if program is None or program.verifier in REPORTED:
            self.intake.take(program_id)

    # --- ended ---

    def verify(self, command: c.Verify) -> None:
        """The router asks for a verdict."""
        kept = self.intake.take(command.program_id)
        program = self._host.router.table.by_id.get(command.program_id)
        domain = None if program is None else program.domain
        self._judge(self._job(command.program_id, command.task_type or "", domain, kept))

    def _job(self, program_id: ProgramId, task_type: str, domain: str | None, kept: Kept | None) -> Job:
        lack = "what it was asked and answered is not kept any more" if kept is None else kept.lack
        kept = Kept() if kept is None else kept
        spec = self._task_types.get(task_type)
        references = {**(spec.references if spec is not None else {}), **kept.references}
        case = Case(
            program_id=program_id,
            task_type=task_type or None,
            domain=domain,
            prompt=kept.prompt,
            answer=kept.answer,
            artefacts=kept.artefacts,
            references=references,
        )
        return Job(program_id=program_id, task_type=task_type, case=case, lack=lack)

    def _judge(self, job: Job) -> None:
        spool, program_id = self.spool, ProgramId(job.program_id)
        if spool is None or self._is_closed:
            self._submit_held(job)
            return
        self._writing[program_id] = []

        def write() -> None:
            problem = spool.put(job)
            self._host.call_on_loop(self._written, job, problem)

        self._disk.submit(write)

    def _written(self, job: Job, problem: str | None) -> None:
        if problem is not None and not self._is_spool_broken:
            self._say(f"{problem}; what waits to be judged would not survive a restart")
        self._is_spool_broken = problem is not None
        for callback in self._writing.pop(ProgramId(job.program_id), ()):
            callback()
        if self._is_closed:
            return
        if problem is None:
            self.verification.submit(_light(job))
        else:
            self._submit_held(job)

    def _submit_held(self, job: Job) -> None:
        """Put a case in line that is nowhere but in memory; bounded together."""
        n_bytes = len(job.case.prompt) + len(job.case.answer) + sum(map(len, job.case.artefacts.values()))
        if sum(self._held_bytes.values()) + n_bytes > self._held_max_bytes:
            text = f"cases of {self._held_max_bytes} bytes wait in memory already, which is the limit"
            job = msgspec.structs.replace(job, case=Case(), lack=job.lack or text)
        elif not job.lack:
            self._held_bytes[ProgramId(job.program_id)] = n_bytes
        self.verification.submit(job)

    def _load(self, program_id: str) -> Job | None:
        return None if self.spool is None else self.spool.get(program_id)

    def when_written(self, program_id: ProgramId, callback: Callable[[], None]) -> None:
        """Call back once a program's case is on disk; at once where it is not on its way there."""
        waiting = self._writing.get(program_id)
        if waiting is None:
            callback()
        else:
            waiting.append(callback)

    def _is_wanted(self, program_id: str) -> bool:
        return program_id in self._host.router.table.verifying

    def _deliver(self, job: Job, verdict: Verdict) -> None:
        program_id = ProgramId(job.program_id)
        self._held_bytes.pop(program_id, None)
        if not self._is_wanted(program_id):
            self._remove(program_id)
            return
        arrived = e.VerdictArrived(at_s=self._host.now_s(), program_id=program_id, verdict=verdict)
        self._host.post(arrived, lambda trouble: self._delivered(program_id, trouble))

    def _delivered(self, program_id: ProgramId, trouble: Error | None) -> None:
        """The case is removed when its verdict is on disk, and not before."""
        if trouble is not None or self.spool is None:
            return

        def on_durable(error: Error | None) -> None:
            if error is None:
                self._remove(program_id)

        try:
            self._when_durable(on_durable)
        except Error:
            return  # it is judged again after the restart

    def _remove(self, program_id: ProgramId) -> None:
        if self.spool is not None and not self._is_closed:
            self._disk.submit(self.spool.remove, program_id)

    # --- from start to end ---

    def start(self) -> None:
        """Begin to judge, first what an earlier run has left."""
        self.verification.start()
        spool, table = self.spool, self._host.router.table
        n_again = 0
        for program_id in list(table.verifying):
            program = table.by_id[program_id]
            if program.verifier in REPORTED or program_id in self._writing:
                continue
            n_again += 1
            job = self._job(program_id, program.task_type or "", program.domain, None)
            self.verification.submit(job if spool is None or program_id not in spool else _light(job))
        if spool is not None:
            open_ids = [p for p in table.by_id if p in spool and table.by_id[p].is_open]
            for program_id in open_ids:  # its finish was not journaled: it goes on
                found = spool.get(program_id)
                if found is not None:
                    self.intake.restore(program_id, found.case, self._host.now_s())
            spool.keep_only([*table.verifying, *open_ids, *self._writing])
        if n_again:
            self._say(f"{n_again} programs of an earlier run are judged again")

    async def close(self) -> None:
        """Stop judging; what is spooled is judged after the next start."""
        self._is_closed = True
        await self.verification.close()
        self.carrier.close()
        self._disk.shutdown(wait=True)
