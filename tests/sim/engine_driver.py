"""Drives one engine as a host does, without a world around it."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from loadwise.sim.engine import Engine, EngineRequest


class Seen(NamedTuple):
    """What became of one request."""

    first_at_s: float
    finished_at_s: float
    n_tokens: int
    cached_tokens: int


def drive(
    engine: Engine,
    arrivals: Iterable[tuple[float, EngineRequest]],
    cancels: Iterable[tuple[float, int]] = (),
    *,
    tick_s: float = math.inf,
    checks: bool = True,
) -> dict[int, Seen]:
    """Run to rest; with `tick_s` the engine is also called early, at least that often."""
    todo = sorted([(at, 0, r) for at, r in arrivals] + [(at, 1, i) for at, i in cancels], key=lambda x: (x[0], x[1]))
    seen: dict[int, Seen] = {}
    now_s, wake_at_s, i = 0.0, math.inf, 0
    while i < len(todo) or wake_at_s < math.inf:
        due_at_s = todo[i][0] if i < len(todo) else math.inf
        now_s = min(wake_at_s, due_at_s, now_s + tick_s)
        step = engine.step(now_s)
        outputs = step.outputs
        if now_s == due_at_s:
            _, kind, what = todo[i]
            i += 1
            engine.submit(what) if kind == 0 else engine.cancel(what)  # type: ignore[arg-type]
            step = engine.step(now_s)
            outputs += step.outputs
        for out in outputs:
            was = seen.get(out.request_id, Seen(math.nan, math.nan, 0, 0))
            seen[out.request_id] = Seen(
                now_s if out.is_first else was.first_at_s,
                now_s if out.is_finished else was.finished_at_s,
                was.n_tokens + out.n_new_tokens,
                out.cached_tokens,
            )
        wake_at_s = now_s + step.seconds if step.seconds > 0 else math.inf
        if checks:
            engine.check()
    return seen
