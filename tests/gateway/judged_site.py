"""What tests of verifiers behind a gateway share: a task type, a turn of it, and waiting for its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sites import Site, until

TYPED = {"X-Loadwise-Task-Type": "sum"}


def exact(**more: Any) -> dict[str, Any]:
    """A task type judged by comparison with a reference."""
    return {"sum": {"verifier": {"kind": "exact"}, **more}}


async def closed(s: Site, program_id: str) -> Any:
    """The program once it is judged."""
    await until(lambda: s.program(program_id) is not None and s.program(program_id).verdict is not None)  # type: ignore[union-attr]
    return s.program(program_id)


async def answered(s: Site, program_id: str, *, headers: Mapping[str, str] = TYPED, **more: Any) -> None:
    """One turn of a program of the task type."""
    answer = await s.chat(program_id, "how much is 6 times 7?", headers=dict(headers), **more)
    assert answer.status == 200, answer.body
