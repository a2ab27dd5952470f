"""Plays a scenario's failures on running backends: the same script as in the simulator, in real or scaled time."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadwise.sim.scenario import Failure

if TYPE_CHECKING:
    from .backend import EmulatedBackend


class Misfortunes:
    """One task for each failure, from now on."""

    def __init__(self, backends: "Mapping[str, EmulatedBackend]", failures: Sequence[Failure], scale: float) -> None:
        """
        Args:
            scale: Engine seconds per real second.
        """
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(_befall(backends[one.backend], one, scale)) for one in failures]

    async def close(self) -> None:
        """No more of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _befall(backend: "EmulatedBackend", failure: Failure, scale: float) -> None:
    await asyncio.sleep(failure.at_s / scale)
    if failure.kind == "crash":
        await backend.go_down()
    elif failure.kind == "hang":
        backend.hang()
    else:
        backend.driver.set_speed(failure.speed_ratio)
    if failure.for_s is not None:
        await asyncio.sleep(failure.for_s / scale)
        await backend.recover()
