"""An emulator on a loop of its own, beside code that is not asynchronous."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .emulator import EmulatorHandle, EmulatorSpec, start_emulator
from .script import Script

_T = TypeVar("_T")


@contextmanager
def emulator_in_thread(spec: EmulatorSpec, script: Script | None = None) -> Iterator[EmulatorHandle]:
    """Run an emulator until the block ends. Its handle may be asked for addresses only; all else goes over HTTP."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="emulator", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        handle = run(start_emulator(spec, script=script))
        try:
            yield handle
        finally:
            run(handle.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
