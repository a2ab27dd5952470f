"""The user's own verdict: a command on this machine, or a webhook.

Both get the case as one JSON object and are trusted; what they print may still hold text of the answer, so it is read
strictly. By default a command speaks by its exit code alone: 0 passes, 1 fails, anything else is its own trouble.
"""

import json
import math
import re
import shlex
from typing import Any, Literal

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

from .case import Case
from .check import CallWebhook, Finding, RunCommand
from .options import read_options, strict_json
from .reading import encodable
from .spec import VerifierSpec
from .verifier import State, Step, Verifier, Wanted, abstained, failed, not_carried_out, passed, shown

_URL = re.compile(r"https?://[^\s/]{1,300}(?:/\S{0,2000})?")


class KnownCase(Fact, frozen=True, kw_only=True):
    """A case that the user knows the verdict of."""

    prompt: str = ""
    answer: str = ""
    artefacts: dict[str, str] = {}
    references: dict[str, str] = {}

    def case(self) -> Case:
        """As a verifier gets it."""
        return Case(prompt=self.prompt, answer=self.answer, artefacts=self.artefacts, references=self.references)


class CommandOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `command`; its line is the key `run`."""

    reads: Literal["exit", "json"] = "exit"
    """`exit`: the exit code alone. `json`: the last line of stdout is {"verdict", "score"?, "explanation"?}."""
    known_pass: KnownCase | None = None
    known_fail: KnownCase | None = None


class WebhookOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `webhook`; its address is the key `url`."""

    known_pass: KnownCase | None = None
    known_fail: KnownCase | None = None


class Command:
    """Passes where the user's command says so."""

    kind = "command"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, CommandOptions)
        if spec.run is None or not spec.run.strip():
            raise ConfigError("verifier 'command' needs the key run, the command line")
        try:
            self._argv = tuple(shlex.split(spec.run))
        except ValueError as error:
            raise ConfigError(f"verifier 'command': run is {spec.run!r}, which cannot be split: {error}") from error
        self._wall_s = spec.timeout_s

    def begin(self, case: Case) -> Step:
        """Ask for the run."""
        return Wanted(check=RunCommand(argv=self._argv, stdin=_told(case), wall_s=self._wall_s))

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Read its exit code or its last line."""
        trouble = not_carried_out(self, finding)
        if trouble:
            return trouble
        if finding.killed or finding.exit_code is None:
            return abstained(self, f"the command was stopped: {finding.killed} {finding.reason}")
        if self.options.reads == "exit":
            if finding.exit_code not in (0, 1):
                return abstained(
                    self, f"the command ended with {finding.exit_code}; 0 passes, 1 fails", evidence=_end(finding)
                )
            judged = passed if finding.exit_code == 0 else failed
            return judged(self, f"the command ended with {finding.exit_code}", evidence=_end(finding))
        if finding.exit_code != 0:
            return abstained(self, f"the command ended with {finding.exit_code}, expected 0", evidence=_end(finding))
        if finding.is_truncated:
            return abstained(self, "the command printed more than is read")
        lines = finding.stdout.decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return read_report(self, last, "the command's last line")

    def known_pass(self) -> Case | None:
        """As the user configured it."""
        return self.options.known_pass.case() if self.options.known_pass else None

    def known_fail(self) -> Case | None:
        """As the user configured it."""
        return self.options.known_fail.case() if self.options.known_fail else None


class Webhook:
    """Passes where the user's service says so."""

    kind = "webhook"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, WebhookOptions)
        if spec.url is None or not _URL.fullmatch(spec.url):
            raise ConfigError(f"verifier 'webhook' needs the key url, an http or https address; found {spec.url!r}")
        self._url = spec.url
        self._wall_s = spec.timeout_s

    def begin(self, case: Case) -> Step:
        """Ask for the call."""
        return Wanted(check=CallWebhook(url=self._url, body=_plain(case), wall_s=self._wall_s))

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Read the answer."""
        trouble = not_carried_out(self, finding)
        if trouble:
            return trouble
        if finding.exit_code != 200:
            return abstained(self, f"the webhook answered with status {finding.exit_code}, expected 200")
        if finding.is_truncated:
            return abstained(self, "the webhook answered more than is read")
        return read_report(self, finding.stdout.decode("utf-8", "replace"), "the webhook's answer")

    def known_pass(self) -> Case | None:
        """As the user configured it."""
        return self.options.known_pass.case() if self.options.known_pass else None

    def known_fail(self) -> Case | None:
        """As the user configured it."""
        return self.options.known_fail.case() if self.options.known_fail else None


def read_report(by: Verifier, text: str, what: str) -> Step:
    """A verdict from `{"verdict": "pass|fail|abstain", "score"?: number, "explanation"?: text}`; nothing else is
    one."""
    try:
        told: Any = strict_json(text.strip(), depth_limit=8)
    except ValueError as error:
        return abstained(by, f"{what} is no verdict: {error}")
    if not isinstance(told, dict) or told.get("verdict") not in ("pass", "fail", "abstain"):
        return abstained(by, f"{what} is no verdict: {shown(text)}")
    why = str(told.get("explanation") or f"{what} says {told['verdict']}")
    if told["verdict"] == "abstain":
        return abstained(by, why)
    score = told.get("score")
    if score is None:
        return passed(by, why) if told["verdict"] == "pass" else failed(by, why)
    if isinstance(score, bool) or not isinstance(score, int | float) or not (math.isfinite(score) and 0 <= score <= 1):
        return abstained(by, f"{what} has the score {shown(repr(score))}; it must be in [0, 1]")
    return (passed if told["verdict"] == "pass" else failed)(by, why, score=float(score))


def _told(case: Case) -> bytes:
    return json.dumps(case.to_builtins()).encode()


def _plain(case: Case) -> dict[str, Any]:
    """The case without halves of surrogate pairs, which no JSON body can carry."""
    return {key: _whole(value) for key, value in case.to_builtins().items()}


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return value


def _end(finding: Finding) -> dict[str, str]:
    return {
        "stdout": finding.stdout[-500:].decode("utf-8", "replace"),
        "stderr": finding.stderr[-500:].decode("utf-8", "replace"),
    }
