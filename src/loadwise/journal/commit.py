"""Group commit: many waiters share one sync, which runs in a thread beside the host's loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from loadwise.kernel.errors import JournalError, Overloaded

from .store import JournalWriter

WAITERS_MAX = 10_000
"""Waiters at once (law L15); beyond it a caller is told to come again."""

OnDurable = Callable[[JournalError | None], None]


class GroupCommit:
    """Syncs a journal for all who wait at the moment, so that a verdict costs a share of one sync.

    `request` and `wait` belong to the writer's own thread, because they flush; callbacks run in the syncing thread.
    """

    def __init__(self, writer: JournalWriter, *, waiters_max: int = WAITERS_MAX) -> None:
        self._writer = writer
        self._waiters_max = waiters_max
        self._waiters: list[OnDurable] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.n_syncs = 0
        self.n_broken_callbacks = 0
        """Callbacks that raised; their exception is theirs, the other waiters are still told."""

    def request(self, on_durable: OnDurable) -> None:
        """Flush, and have `on_durable` called once all appended so far is on disk (None) or cannot be (the error).

        Raises:
            JournalError: the flush failed.
            Overloaded: too many wait already.
        """
        if len(self._waiters) >= self._waiters_max:
            raise Overloaded(f"{len(self._waiters)} callers wait for the journal; {self._waiters_max} is the limit")
        self._writer.flush()
        with self._wake:
            if self._is_closing:
                raise JournalError("the journal's group commit is closed", code="journal_closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="journal-sync", daemon=True)
                self._thread.start()
            self._waiters.append(on_durable)
            self._wake.notify()

    async def wait(self) -> None:
        """Return when all appended so far is on disk.

        Raises:
            JournalError: it is not, and will not be.
            Overloaded: too many wait already.
        """
        loop = asyncio.get_running_loop()
        durable: asyncio.Future[None] = loop.create_future()

        def settle(error: JournalError | None) -> None:
            if durable.done():
                return
            if error is None:
                durable.set_result(None)
            else:
                durable.set_exception(error)

        def on_durable(error: JournalError | None) -> None:
            # The loop may have ended while the disk was busy; then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, error)

        self.request(on_durable)
        await durable

    def close(self) -> None:
        """Serve those who wait, then end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiters and not self._is_closing:
                    self._wake.wait()
                waiters, self._waiters = self._waiters, []
            if not waiters:
                return
            error: JournalError | None = None
            try:
                self._writer.sync_written()
            except JournalError as failure:
                error = failure
            self.n_syncs += 1
            for on_durable in waiters:
                try:
                    on_durable(error)
                except Exception:  # the outermost loop of this thread: one waiter must not cost the others their answer
                    self.n_broken_callbacks += 1
