"""What a verifier asks of the world, and what comes back: checks out, findings in.

The runner carries out any `Check`, within its limits, and answers with one `Finding`. It retries what failed by no
fault of the judged program (`FindingStatus.ERROR` and `TIMEOUT`); a verifier sees the finding of the last try. Both
are plain data, so a queue of them survives a restart.
"""

import enum
import math
from typing import Any

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact

SCRIPT = "{script}"
"""Stands in `RunInSandbox.argv` for the path of `RunInSandbox.script` inside the sandbox."""

DIRECTORY = "{directory}"
"""Stands in `RunInSandbox.argv` for the working directory, which holds `files` and `copy_in`."""


class Limits(Fact, frozen=True, kw_only=True):
    """What a run in a sandbox may use. Each is enforced for the whole group of processes, or for each where noted.

    Raises:
        ConfigError: a limit is not a finite number above 0.
    """

    wall_s: float = 30.0
    cpu_s: float = 20.0
    """Per process."""
    memory_bytes: int = 1 << 30
    """Address space, per process."""
    processes: int = 32
    file_bytes: int = 64 << 20
    """Size of one written file."""
    output_bytes: int = 1 << 20
    """Of stdout, of stderr and of each file of `outputs`; what is beyond is cut off and the run stopped."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"limit {name} is {value!r}; it must be a finite number > 0")


class _Check(Fact, frozen=True, kw_only=True, tag=True):
    pass


class RunInSandbox(_Check, frozen=True, kw_only=True):
    """Run a program that nobody trusts: no network, a private file system, hard limits, killed as a group.

    The working directory is fresh and writable and holds `copy_in` and `files`, nothing else.
    """

    argv: tuple[str, ...]
    """`{script}` and `{directory}` are replaced. A bare program name is looked up inside the sandbox."""
    script: str = ""
    """One of our scripts, in `loadwise/runner/sandboxed`; laid outside the working directory, read-only."""
    files: dict[str, bytes] = {}
    """Relative path to content, written over `copy_in`."""
    copy_in: str | None = None
    """A directory of the host, copied, never mounted writable; links that lead out of it are not followed."""
    stdin: bytes = b""
    """Handed over by a pipe: what stands here must not lie in any file of the sandbox."""
    environment: dict[str, str] = {}
    """Everything that the run sees of an environment, besides a plain PATH, HOME, LANG."""
    outputs: tuple[str, ...] = ()
    """Relative paths to read back afterwards, each at most `limits.output_bytes`; absent ones are left out."""
    limits: Limits = Limits()


class RunSmallPython(_Check, frozen=True, kw_only=True):
    """Evaluate a little Python in the interpreter without files, network or imports (pydantic-monty).

    `value` of the finding is the value of the last expression as builtins. What the interpreter does not know is a
    finding with `status` REFUSED: the verifier then asks for a sandbox.
    """

    source: str
    inputs: dict[str, Any] = {}
    wall_s: float = 2.0
    memory_bytes: int = 64 << 20


class Compute(_Check, frozen=True, kw_only=True):
    """Call `verify.computations.COMPUTATIONS[function](**arguments)` in a worker process under a limit.

    For pure functions that may take long or crash; `value` of the finding is what it returned.
    """

    function: str
    arguments: dict[str, Any] = {}
    wall_s: float = 5.0
    memory_bytes: int = 1 << 30


class Message(Fact, frozen=True, kw_only=True):
    """One message of a model call."""

    role: str
    content: str


class AskModel(_Check, frozen=True, kw_only=True):
    """Ask a model of the pool, as a turn through the router: its load and its cost are accounted.

    `text` of the finding is the reply.
    """

    messages: tuple[Message, ...]
    model: str | None = None
    """None leaves the choice to the router."""
    max_tokens: int = 512
    temperature: float = 0.0
    purpose: str = "judge"
    wall_s: float = 60.0


class CallWebhook(_Check, frozen=True, kw_only=True):
    """POST JSON to the user's own service.

    `stdout` of the finding is the body, `exit_code` the HTTP status. No connection, a status of 429 or one of 500 and
    more is an ERROR, so it is retried.
    """

    url: str
    body: dict[str, Any] = {}
    wall_s: float = 60.0
    output_bytes: int = 1 << 20


class RunCommand(_Check, frozen=True, kw_only=True):
    """Run the user's own program outside any sandbox: he trusts it, and it may use his machine. No shell."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    wall_s: float = 60.0
    output_bytes: int = 1 << 20


class RunContainer(_Check, frozen=True, kw_only=True):
    """Run a command in a container, through a container engine, without network."""

    image: str
    """An image, or a stopped container that the agent worked in (`container:` and its name)."""
    argv: tuple[str, ...]
    files: dict[str, bytes] = {}
    """Absolute path in the container to content, written before the command starts."""
    outputs: tuple[str, ...] = ()
    """Absolute paths to read back afterwards; absent ones are left out."""
    limits: Limits = Limits(wall_s=600.0, cpu_s=600.0, memory_bytes=4 << 30, processes=512)


class AwaitReport(_Check, frozen=True, kw_only=True):
    """Nothing to carry out: somebody reports the verdict over HTTP."""


Check = RunInSandbox | RunSmallPython | Compute | AskModel | CallWebhook | RunCommand | RunContainer | AwaitReport


class FindingStatus(enum.StrEnum):
    """Whether a check was carried out. It says nothing about what was found."""

    OK = "ok"
    """It was, be it to its end or stopped at one of its own limits; then `killed` names the limit."""
    TIMEOUT = "timeout"
    """A model, webhook, command or computation gave no answer within `wall_s`. Retried before it is told."""
    REFUSED = "refused"
    """It may not be carried out here: no sandbox, no container engine, a quota is spent. Not retried."""
    ERROR = "error"
    """Something of ours broke. Retried before it is told."""


class Finding(Fact, frozen=True, kw_only=True):
    """What came of a check."""

    status: FindingStatus = FindingStatus.OK
    reason: str = ""
    """Why `status` is not OK, or why the run was stopped, in words for a human."""
    exit_code: int | None = None
    """Of the process, negative for a signal; the HTTP status of a webhook; None where there was neither."""
    killed: str = ""
    """Which limit stopped the run: `wall`, `cpu`, `memory`, `processes`, `file`, `output`; empty where none did."""
    stdout: bytes = b""
    stderr: bytes = b""
    is_truncated: bool = False
    """Some stream or file was longer than `output_bytes` and is cut."""
    outputs: dict[str, bytes] = {}
    value: Any = None
    """What a computation returned."""
    text: str = ""
    """What a model replied."""
    took_s: float = 0.0
    cost_usd: float = 0.0
