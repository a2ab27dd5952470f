"""Small Python in an interpreter without files, network or imports (pydantic-monty): a fast path, never the last word.

What it evaluates to its end, or an assertion that fails there, is as good as in CPython. Anything else that goes wrong
may be a gap of the interpreter, which knows a subset of the language, so it is refused and a sandbox has the last word.
"""

import threading
import time
from typing import Any

from loadwise.verify.check import Finding, FindingStatus, RunSmallPython

OUTPUT_MAX_BYTES = 1 << 20
PROCESSES = 2
CHECKOUTS_PER_PROCESS = 500
_PLAIN = (bool, int, float, str, bytes, type(None))


class SmallPython:
    """Evaluates `RunSmallPython`; its worker processes start with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Any = None
        self._problem: str | None = None

    def run(self, check: RunSmallPython) -> Finding:
        """Evaluate; blocks its thread for `wall_s` and a second at most."""
        began_at_s = time.monotonic()
        pool = self._open()
        if pool is None:
            return Finding(status=FindingStatus.REFUSED, reason=str(self._problem))
        finding = _evaluate(pool, check)
        took: dict[str, Any] = {name: getattr(finding, name) for name in finding.__struct_fields__}
        return Finding(**{**took, "took_s": time.monotonic() - began_at_s})

    def _open(self) -> Any:
        with self._lock:
            if self._pool is None and self._problem is None:
                try:
                    from pydantic_monty import Monty

                    opened = Monty(
                        min_processes=1, max_processes=PROCESSES, max_checkouts_per_worker=CHECKOUTS_PER_PROCESS
                    )
                    self._pool = opened.__enter__()
                except ImportError:
                    self._problem = "pydantic-monty is not installed (extra verify)"
                except Exception as error:
                    self._problem = f"pydantic-monty does not start: {error}"
            return self._pool

    def close(self) -> None:
        """End its processes."""
        with self._lock:
            pool, self._pool, self._problem = self._pool, None, "it is closed"
        if pool is not None:
            pool.__exit__(None, None, None)


def _evaluate(pool: Any, check: RunSmallPython) -> Finding:
    import pydantic_monty as monty

    limits = {"max_feed_duration_secs": check.wall_s, "max_memory": check.memory_bytes, "max_suspensions": 1}
    printed = monty.CollectString(max_bytes=OUTPUT_MAX_BYTES)
    try:
        with pool.checkout(limits=limits) as session:
            value = session.feed_run(check.source, inputs=dict(check.inputs), print_callback=printed)
    except monty.MontyCrashedError as error:
        status = FindingStatus.TIMEOUT if getattr(error, "timed_out", False) else FindingStatus.ERROR
        return Finding(status=status, reason=f"the interpreter's process ended: {error}"[:300])
    except monty.MontyError as error:
        return _complaint(error.exception(), printed.output)
    except Exception as error:  # inputs or source that it cannot take
        return Finding(status=FindingStatus.REFUSED, reason=f"{type(error).__name__}: {error}"[:300])
    if not _is_plain(value):
        return Finding(status=FindingStatus.REFUSED, reason="its value is none of the builtins")
    return Finding(exit_code=0, value=value, stdout=printed.output.encode("utf-8", "replace"))


def _complaint(error: BaseException, printed: str) -> Finding:
    text = f"{type(error).__name__}: {error}"[:300]
    stdout = printed.encode("utf-8", "replace")
    if isinstance(error, AssertionError):
        return Finding(exit_code=1, stdout=stdout, stderr=text.encode("utf-8", "replace"))
    if isinstance(error, TimeoutError) and "time limit" in str(error):
        return Finding(killed="wall", reason=text, stdout=stdout)
    if isinstance(error, MemoryError) and "memory limit" in str(error):
        return Finding(killed="memory", reason=text, stdout=stdout)
    return Finding(status=FindingStatus.REFUSED, reason=text)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if depth > 100:
        return False
    if isinstance(value, dict):
        return all(_is_plain(key, depth + 1) and _is_plain(item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item, depth + 1) for item in value)
    return False
