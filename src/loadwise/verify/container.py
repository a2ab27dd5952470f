"""Container tests, as Terminal-Bench runs them: the agent's container, the task's tests laid in, one command.

Unproven until it has run on a container engine: here it is tested against findings made by hand. The tests are written
into the container only after the agent has left, and the agent was root in it, so it may have prepared the ground: a
replaced
`python3` or `bash` answers what it likes. Run tests that matter from an image of their own (`image`, with the agent's
files as artefacts).
"""

import xml.etree.ElementTree
from typing import Literal

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .case import Case
from .check import Finding, Limits, RunContainer
from .options import read_options, require_range, strict_json
from .spec import VerifierSpec
from .verifier import State, Step, Wanted, abstained, failed, not_carried_out, passed, shown

_REPORT_MAX_BYTES = 4 << 20


class ContainerOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `container`."""

    image: str = ""
    """Where the case names no `image` or `container`."""
    command: tuple[str, ...] = ("bash", "/tests/run-tests.sh")
    tests_directory: str = "/tests"
    report: str = ""
    """Absolute path of a JUnit report that the command writes; without it the exit code decides."""
    reads: Literal["exit", "junit"] = "exit"
    timeout_s: float = 600.0
    memory_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        require_range("timeout_s", self.timeout_s, 1.0, 86400.0)
        require_range("memory_bytes", self.memory_bytes, 32 << 20, 1 << 42)
        if (self.reads == "junit") != bool(self.report):
            raise ConfigError("report must be given where reads is 'junit', and nowhere else")
        for name, path in (("report", self.report), ("tests_directory", self.tests_directory)):
            if path and (not path.startswith("/") or ".." in path.split("/")):
                raise ConfigError(f"{name} is {path!r}; it must be an absolute path without '..'")
        if not self.command:
            raise ConfigError("command is empty; it must be what runs the tests")


class ContainerTests:
    """Passes where the tests' command ends with 0, or where its report holds tests and all of them passed."""

    kind = "container"
    version = "1-unproven"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, ContainerOptions)

    def begin(self, case: Case) -> Step:
        """Ask for the run."""
        container = case.given("container")
        image = f"container:{container}" if container else case.given("image") or self.options.image
        if not image:
            return abstained(self, "there is no container or image to run the tests in")
        if not image.isprintable() or image.startswith("-"):
            return abstained(self, f"the image {shown(image)} is no name of one")
        files = _files(case, self.options.tests_directory)
        if isinstance(files, str):
            return abstained(self, files)
        limits = Limits(
            wall_s=self.options.timeout_s,
            cpu_s=self.options.timeout_s * 4,
            memory_bytes=self.options.memory_bytes,
            processes=1024,
            output_bytes=_REPORT_MAX_BYTES,
        )
        outputs = (self.options.report,) if self.options.report else ()
        return Wanted(
            check=RunContainer(image=image, argv=self.options.command, files=files, outputs=outputs, limits=limits)
        )

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Read the exit code or the report."""
        trouble = not_carried_out(self, finding)
        if trouble:
            return trouble
        evidence = {"stdout": finding.stdout[-1000:].decode("utf-8", "replace")}
        if finding.killed:
            return failed(self, f"the tests were stopped at the limit {finding.killed!r}", evidence=evidence)
        if self.options.reads == "junit":
            return self._by_report(finding, evidence)
        if finding.exit_code is None or finding.exit_code in (125, 126, 127) or finding.exit_code < 0:
            return abstained(
                self, f"the tests' command could not run: it ended with {finding.exit_code}", evidence=evidence
            )
        judged = passed if finding.exit_code == 0 else failed
        return judged(self, f"the tests ended with {finding.exit_code}", evidence=evidence)

    def known_pass(self) -> Case | None:
        """None: only an image tells what its tests pass."""
        return None

    def known_fail(self) -> Case | None:
        """None: only an image tells what its tests fail."""
        return None

    def _by_report(self, finding: Finding, evidence: dict[str, str]) -> Step:
        report = finding.outputs.get(self.options.report)
        if report is None:
            return failed(self, "the tests wrote no report", evidence=evidence)
        if finding.is_truncated or len(report) > _REPORT_MAX_BYTES or b"<!" in report:
            return failed(self, "the tests' report is too long, or no plain report", evidence=evidence)
        try:
            cases = list(xml.etree.ElementTree.fromstring(report).iter("testcase"))
        except (xml.etree.ElementTree.ParseError, ValueError, RecursionError) as error:
            return failed(self, f"the tests' report cannot be read: {error}", evidence=evidence)
        wrong = [
            case.get("name", "")
            for case in cases
            if any(child.tag in ("failure", "error", "skipped") for child in case)
        ]
        if not cases:
            return failed(self, "the tests' report holds no test", evidence=evidence)
        if wrong:
            return failed(self, f"{len(wrong)} of {len(cases)} tests did not pass: {wrong[0][:80]}", evidence=evidence)
        return passed(self, f"{len(cases)} of {len(cases)} tests passed", evidence=evidence)


def _files(case: Case, directory: str) -> dict[str, bytes] | str:
    """The tests' files by their absolute path, or why they cannot be read."""
    given = case.given("test_files")
    if given is None:
        return {}
    try:
        loaded = strict_json(given)
    except ValueError as error:
        return f"test_files is no JSON: {error}"
    if not isinstance(loaded, dict) or not all(isinstance(text, str) for text in loaded.values()):
        return "test_files is no JSON object from path to text"
    for path in loaded:
        if not path or path.startswith("/") or ".." in path.split("/") or not path.isprintable():
            return f"test_files names {path[:80]!r}; paths must stay below {directory}"
    return {f"{directory}/{path}": text.encode("utf-8", "surrogateescape") for path, text in loaded.items()}
