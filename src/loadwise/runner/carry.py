"""Carries out checks: each kind by its own means, none on the event loop's thread, all within their limits.

Models and webhooks are asked by whoever has a network (`asking`); without it they are refused.
"""

import asyncio
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from loadwise.verify.check import (
    AskModel,
    AwaitReport,
    CallWebhook,
    Check,
    Compute,
    Finding,
    FindingStatus,
    Limits,
    RunCommand,
    RunContainer,
    RunInSandbox,
    RunSmallPython,
)

from .bounded import STOP, run_bounded
from .containers import ContainerEngine, NoContainers
from .containment import KILLED_BY, Outcome, Trouble, described
from .monty import SmallPython
from .sandbox import NoSandbox, Sandbox
from .workers import Workers

_T = TypeVar("_T")

THREADS_MAX = 32
"""Checks that block a thread at once."""

Ask = Callable[[AskModel | CallWebhook], Awaitable[Finding]]


class Carrier:
    """Carries out any `Check`.

    Args:
        sandbox: where untrusted code runs; None refuses it.
        containers: the container engine; None refuses containers.
        asking: asks models of the pool and webhooks.
        hidden: names of environment variables that a user's command does not see (API keys).
    """

    def __init__(
        self,
        *,
        sandbox: Sandbox | None = None,
        containers: ContainerEngine | None = None,
        asking: Ask | None = None,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.sandbox: Sandbox = NoSandbox("there is no sandbox here") if sandbox is None else sandbox
        self.asking = asking
        self._containers: ContainerEngine = NoContainers() if containers is None else containers
        self._hidden = hidden
        self._small_python = SmallPython()
        self._workers = Workers()
        # Its threads live until `close`: a sandbox dies with the thread that started it.
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="verify")
        self._stop = threading.Event()

    async def carry(self, check: Check) -> Finding:
        """Carry out a check; never raises for what it finds."""
        if isinstance(check, AwaitReport):
            return Finding(status=FindingStatus.REFUSED, reason="somebody reports the verdict over HTTP")
        if isinstance(check, AskModel | CallWebhook):
            if self.asking is None:
                return Finding(status=FindingStatus.REFUSED, reason="nobody here asks models or webhooks")
            return await self.asking(check)
        return await self.on_thread(lambda: self._blocking(check))

    async def on_thread(self, call: Callable[[], _T]) -> _T:
        """Run something that takes long elsewhere than on the loop."""
        context = contextvars.copy_context()
        context.run(STOP.set, self._stop)
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)

    def _blocking(self, check: RunInSandbox | RunSmallPython | Compute | RunCommand | RunContainer) -> Finding:
        try:
            match check:
                case RunInSandbox():
                    return finding_of(self.sandbox.run(check), check.limits)
                case RunSmallPython():
                    return self._small_python.run(check)
                case Compute():
                    return self._workers.run(check)
                case RunContainer():
                    return self._containers.run(check)
                case RunCommand():
                    return self._command(check)
        except Exception as error:  # whatever it is, it is ours and not the program's
            return Finding(status=FindingStatus.ERROR, reason=f"{type(error).__name__}: {error}"[:300])

    def _command(self, check: RunCommand) -> Finding:
        """The operator's own program: his machine, his limits; time and output are bounded all the same."""
        limits = Limits(
            wall_s=check.wall_s,
            cpu_s=1e9,
            memory_bytes=1 << 50,
            processes=1 << 20,
            file_bytes=1 << 50,
            output_bytes=check.output_bytes,
        )
        environment = {name: value for name, value in os.environ.items() if name not in self._hidden}
        if not check.argv:
            return Finding(status=FindingStatus.REFUSED, reason="there is no command")
        outcome, _ = run_bounded(check.argv, limits, stdin=check.stdin, environment=environment)
        if outcome.trouble is Trouble.WALL:
            reason = f"no answer within {check.wall_s:g} s"
            return Finding(status=FindingStatus.TIMEOUT, reason=reason, took_s=outcome.wall_s)
        if outcome.trouble is not Trouble.OUTPUT:
            # What it says of itself on stderr names no limit of ours: there is none.
            is_ours = outcome.trouble in (Trouble.SANDBOX, Trouble.STOPPED)
            trouble = outcome.trouble if is_ours else Trouble.NONE
            outcome = msgspec.structs.replace(outcome, trouble=trouble)
        return finding_of(outcome, limits)

    def close(self) -> None:
        """Kill what runs and end what waits."""
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._small_python.close()
        self._workers.close()


def finding_of(outcome: Outcome, limits: Limits) -> Finding:
    """A contained run as a finding: stopped at a limit is a finding too, an absent sandbox is none."""
    if outcome.trouble is Trouble.REFUSED:
        return Finding(status=FindingStatus.REFUSED, reason=outcome.detail)
    if outcome.trouble in (Trouble.SANDBOX, Trouble.STOPPED):
        return Finding(status=FindingStatus.ERROR, reason=described(outcome, limits), took_s=outcome.wall_s)
    is_plain = outcome.trouble in (Trouble.NONE, Trouble.EXIT)
    return Finding(
        exit_code=outcome.status,
        killed=KILLED_BY.get(outcome.trouble, ""),
        reason="" if is_plain else described(outcome, limits),
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        is_truncated=outcome.is_cut,
        outputs=outcome.outputs,
        took_s=outcome.wall_s,
    )
