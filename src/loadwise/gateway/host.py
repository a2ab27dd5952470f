"""The live host: the one owner of the stack. Everything that happens is posted here as an event, in order.

Theory of operation. `post` stamps nothing and waits for nothing: the event carries its instant, the stack answers with
commands, the journal takes both, and the commands are carried out, all on the event loop's thread. Carrying out a
command may cause the next event (an answer to one request lets the next one on that connection in); such events queue
behind, so the stack is never entered twice. A decision is handed to the kernel's file cache before it is dispatched;
everything else is written at the end of the loop's turn. A verdict is acknowledged when it is on disk.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import JournalError, Overloaded
from loadwise.kernel.ids import TurnId
from loadwise.kernel.stack import Stack
from loadwise.router.machine import Router


class Journal(Protocol):
    """What the host asks of a journal writer."""

    def append(self, event: e.Event, commands: list[c.Command]) -> int: ...
    def flush(self) -> None: ...


class TurnRelay(Protocol):
    """What the host asks of the relay that carries one turn."""

    def dispatch(self, command: c.Dispatch) -> None: ...
    def cancel(self) -> None: ...
    def end(self, command: c.EndTurn) -> None: ...


class Host:
    """Feeds the stack and carries out its commands.

    Args:
        started_at_s: where the run's clock stands now: 0 for a new journal, the last entry's instant after recovery.
        run_id: tells this run's names from those of earlier runs on the same journal.
        ask_selector: carries out `AskSelector`; None where no selector is configured.
    """

    def __init__(
        self,
        stack: Stack,
        journal: Journal | None,
        *,
        started_at_s: float = 0.0,
        run_id: str = "0",
        ask_selector: Callable[[c.AskSelector], None] | None = None,
    ) -> None:
        self.stack = stack
        router = stack.machine_by_name["router"]
        assert isinstance(router, Router)
        self.router = router
        self.journal = journal
        self.run_id = run_id
        self.relay_by_turn: dict[TurnId, TurnRelay] = {}
        self.on_verify: Callable[[c.Verify], None] = lambda command: None
        self.failure: str | None = None
        """Why no new work is taken: the journal cannot be written."""
        self._ask_selector = ask_selector
        self._loop = asyncio.get_running_loop()
        self._offset_s = started_at_s - time.monotonic()
        self._last_at_s = started_at_s
        self._queue: deque[tuple[e.Event, Callable[[], None] | None]] = deque()
        self._is_draining = False
        self._is_flush_due = False
        self._timer_by_name: dict[str, asyncio.TimerHandle] = {}
        self._n_turns = router.counts.arrived
        self._execute_by_command: dict[type, Callable[..., None]] = {
            c.Dispatch: self._dispatch,
            c.CancelAttempt: self._cancel,
            c.EndTurn: self._end_turn,
            c.SetTimer: self._set_timer,
            c.AskSelector: self._ask,
            c.Verify: lambda command: self.on_verify(command),
        }

    def now_s(self) -> float:
        """Seconds on the run's clock; never falls (law L3)."""
        now_s = time.monotonic() + self._offset_s
        if now_s > self._last_at_s:
            self._last_at_s = now_s
        return self._last_at_s

    def next_turn_id(self) -> TurnId:
        """A number that no turn has had."""
        self._n_turns += 1
        return TurnId(self._n_turns)

    def post(self, event: e.Event, then: Callable[[], None] | None = None) -> None:
        """Let an event happen; `then` is called when its commands have been carried out."""
        self._queue.append((event, then))
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self._queue:
                event, then = self._queue.popleft()
                self._handle(event)
                if then is not None:
                    then()
        finally:
            self._is_draining = False

    def _handle(self, event: e.Event) -> None:
        commands = self.stack.handle(event)
        journal = self.journal
        if journal is not None:
            self._write(journal, event, commands)
        execute = self._execute_by_command
        for command in commands:
            do = execute.get(type(command))
            if do is not None:
                do(command)

    def _write(self, journal: Journal, event: e.Event, commands: list[c.Command]) -> None:
        try:
            journal.append(event, commands)
            if any(type(command) is c.RecordDecision for command in commands):
                journal.flush()
            elif not self._is_flush_due:
                self._is_flush_due = True
                self._loop.call_soon(self._flush)
        except JournalError as error:
            self._fail(error)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self.journal is not None:
            try:
                self.journal.flush()
            except JournalError as error:
                self._fail(error)

    def _fail(self, error: JournalError) -> None:
        """What runs is finished; nothing new is taken, for it could not be remembered."""
        if self.failure is None:
            self.failure = error.message

    def require_writable(self) -> None:
        """Refuse new work where it could not be remembered.

        Raises:
            Overloaded: the journal has failed.
        """
        if self.failure is not None:
            raise Overloaded(
                f"the journal cannot be written: {self.failure}", retry_after_s=30.0, code="journal_failed"
            )

    # --- commands -------------------------------------------------------------------------------------------------

    def _dispatch(self, command: c.Dispatch) -> None:
        relay = self.relay_by_turn.get(command.turn_id)
        if relay is not None:
            relay.dispatch(command)

    def _cancel(self, command: c.CancelAttempt) -> None:
        relay = self.relay_by_turn.get(command.turn_id)
        if relay is not None:
            relay.cancel()

    def _end_turn(self, command: c.EndTurn) -> None:
        relay = self.relay_by_turn.pop(command.turn_id, None)
        if relay is not None:
            relay.end(command)

    def _set_timer(self, command: c.SetTimer) -> None:
        known = self._timer_by_name.pop(command.timer, None)
        if known is not None:
            known.cancel()
        delay_s = max(0.0, command.fires_at_s - self.now_s())
        self._timer_by_name[command.timer] = self._loop.call_later(delay_s, self._fire, command)

    def _fire(self, command: c.SetTimer) -> None:
        self._timer_by_name.pop(command.timer, None)
        # The loop's clock counts milliseconds: a timer is never told before it is due.
        self._last_at_s = max(self._last_at_s, command.fires_at_s)
        self.post(e.TimerFired(at_s=self.now_s(), timer=command.timer))

    def _ask(self, command: c.AskSelector) -> None:
        if self._ask_selector is not None:
            self._ask_selector(command)

    def call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Run a function on the host's thread soon; may be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Disarm the timers and write what is left."""
        for handle in self._timer_by_name.values():
            handle.cancel()
        self._timer_by_name.clear()
        self._flush()
