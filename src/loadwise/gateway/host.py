"""The live host: the one owner of the stack. Everything that happens is posted here as an event, in order.

Theory of operation. `post` stamps nothing and waits for nothing: the event carries its instant, the stack answers with
commands, the journal takes both, and the commands are carried out, all on the event loop's thread. Carrying out a
command may cause the next event (an answer to one request lets the next one on that connection in); such events queue
behind, so the stack is never entered twice. A decision is handed to the kernel's file cache before it is dispatched;
everything else is written at the end of the loop's turn. A verdict is acknowledged when it is on disk.

What goes wrong here stops the taking of new work, not what runs. Where the journal cannot be written, a decision that
it does not hold is not carried out, then or later. Where the stack raises (a bug of ours), its state is not to be
trusted: nothing more is written, no snapshot is taken, and a restart recovers what the journal holds. Whoever waits for
an event to have happened is told when it is not in the journal.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from loadwise.kernel import commands as c
from loadwise.kernel import events as e
from loadwise.kernel.errors import Error, JournalError, Overloaded
from loadwise.kernel.ids import DecisionId, TurnId
from loadwise.kernel.stack import Stack
from loadwise.kernel.work import TurnOutcome
from loadwise.router.machine import Router


class Journal(Protocol):
    """What the host asks of a journal writer."""

    dump: Callable[[], bytes] | None
    """Takes a snapshot of the stack; the host takes it away where the stack's state is not what the journal holds."""

    def append(self, event: e.Event, commands: list[c.Command]) -> int: ...
    def flush(self) -> None: ...


class TurnRelay(Protocol):
    """What the host asks of the relay that carries one turn."""

    def dispatch(self, command: c.Dispatch) -> None: ...
    def cancel(self) -> None: ...
    def end(self, command: c.EndTurn) -> None: ...


Then = Callable[[Error | None], None]
"""Told what became of an event: None once it has happened and is in the journal, else why it is not."""


class Host:
    """Feeds the stack and carries out its commands.

    Args:
        started_at_s: where the run's clock stands now: 0 for a new journal, the last entry's instant after recovery.
        time_scale: seconds of the run's clock per real second.
        run_id: tells this run's names from those of earlier runs on the same journal.
        ask_selector: carries out `AskSelector`; None where no selector is configured.
    """

    def __init__(
        self,
        stack: Stack,
        journal: Journal | None,
        *,
        started_at_s: float = 0.0,
        time_scale: float = 1.0,
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
        """Why no new work is taken."""
        self._failure_code = ""
        self._unwritten: set[DecisionId] = set()
        """Decisions that the journal does not hold; nothing of them is ever dispatched."""
        self._ask_selector = ask_selector
        self._loop = asyncio.get_running_loop()
        self._time_scale = time_scale
        self._began_real_s = time.monotonic()
        self._began_at_s = started_at_s
        self._last_at_s = started_at_s
        self._queue: deque[tuple[e.Event, Then | None]] = deque()
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
        now_s = self._began_at_s + (time.monotonic() - self._began_real_s) * self._time_scale
        if now_s > self._last_at_s:
            self._last_at_s = now_s
        return self._last_at_s

    def next_turn_id(self) -> TurnId:
        """A number that no turn has had."""
        self._n_turns += 1
        return TurnId(self._n_turns)

    def post(self, event: e.Event, then: Then | None = None) -> None:
        """Let an event happen; `then` is called when its commands have been carried out.

        Args:
            then: hears why not where the event is not in the journal: it must not be acknowledged.
        """
        queue = self._queue
        queue.append((event, then))
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while queue:
                event, then = queue.popleft()
                self._handle(event)
                if then is not None:
                    self._call(then)
        finally:
            self._is_draining = False

    def _call(self, then: Then) -> None:
        try:
            # After a failure nothing is written, so no event that happened since is in the journal.
            then(self.trouble())
        except Exception as problem:
            self._report("what follows an event raised", problem)

    def _handle(self, event: e.Event) -> None:
        try:
            commands = self.stack.handle(event)
        except Exception as problem:
            self._report(f"the stack raised on {type(event).__name__}", problem)
            self._fail(f"an internal error: {problem}", code="internal_error")
            turn_id = getattr(event, "turn_id", None)
            if turn_id is not None:
                self._end_relay(turn_id, 500, "internal_error", "internal error")
            return
        if not self._write(event, commands):
            commands = self._without_undecided(commands)
        execute = self._execute_by_command
        for command in commands:
            do = execute.get(type(command))
            if do is not None:
                try:
                    do(command)
                except Exception as problem:
                    self._carry_on(command, problem)

    def _write(self, event: e.Event, commands: list[c.Command]) -> bool:
        """Journal an event; False where its decisions are not safe with the kernel."""
        journal = self.journal
        if journal is None:
            return True
        if self.failure is not None:
            return False
        try:
            journal.append(event, commands)
            for command in commands:
                if type(command) is c.RecordDecision:
                    journal.flush()
                    return True
            if not self._is_flush_due:
                self._is_flush_due = True
                self._loop.call_soon(self._flush)
        except Exception as error:
            self._journal_failed(error)
        return self.failure is None

    def _flush(self) -> None:
        self._is_flush_due = False
        if self.journal is not None and self.failure is None:
            try:
                self.journal.flush()
            except Exception as error:
                self._journal_failed(error)

    def _journal_failed(self, error: Exception) -> None:
        if isinstance(error, JournalError):
            self._fail(f"the journal cannot be written: {error.message}", code="journal_failed")
        else:
            self._report("the journal raised", error)
            self._fail(f"the journal cannot be written: {error}", code="journal_failed")

    def _fail(self, text: str, *, code: str) -> None:
        """What runs is finished; nothing new is taken, for it could not be remembered."""
        if self.failure is not None:
            return
        self.failure, self._failure_code = text, code
        if self.journal is not None:
            self.journal.dump = None
            with contextlib.suppress(Exception):  # what came before stands, unless the journal itself has failed
                self.journal.flush()

    def trouble(self) -> Error | None:
        """Why nothing that happens now is remembered; None while all is well."""
        if self.failure is None:
            return None
        if self._failure_code == "internal_error":
            return Error(self.failure)
        return Overloaded(self.failure, retry_after_s=30.0, code=self._failure_code)

    def require_writable(self) -> None:
        """Refuse new work where it could not be remembered.

        Raises:
            Overloaded: the journal has failed.
        """
        if self.failure is not None:
            raise Overloaded(self.failure, retry_after_s=30.0, code=self._failure_code)

    def _without_undecided(self, commands: list[c.Command]) -> list[c.Command]:
        """The commands without the dispatches of decisions that could not be written down; their turns end here."""
        self._unwritten.update(command.decision_id for command in commands if type(command) is c.RecordDecision)
        left: list[c.Command] = []
        for command in commands:
            if type(command) is c.Dispatch and command.decision_id in self._unwritten:
                self._give_up(command.turn_id, 503, self._failure_code, str(self.failure), retry_after_s=30.0)
            else:
                left.append(command)
        return left

    def _give_up(
        self, turn_id: TurnId, status: int, code: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        """End a turn that the host cannot carry on with."""
        self._end_relay(turn_id, status, code, message, retry_after_s=retry_after_s)
        self.post(e.TurnAbandoned(at_s=self.now_s(), turn_id=turn_id))

    def _end_relay(
        self, turn_id: TurnId, status: int, code: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        relay = self.relay_by_turn.pop(turn_id, None)
        if relay is not None:
            end = c.EndTurn(
                turn_id=turn_id,
                outcome=TurnOutcome.FAILED,
                status=status,
                code=code,
                message=message,
                retry_after_s=retry_after_s,
            )
            relay.end(end)

    def _carry_on(self, command: c.Command, problem: Exception) -> None:
        """A bug of ours cost one command; it must not cost the others, nor leave a client without an answer."""
        self._report(f"{type(command).__name__} could not be carried out", problem)
        turn_id = getattr(command, "turn_id", None)
        if turn_id is not None:
            self._give_up(turn_id, 500, "internal_error", "internal error")

    def _report(self, message: str, problem: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": problem})

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
        delay_s = max(0.0, command.fires_at_s - self.now_s()) / self._time_scale
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
