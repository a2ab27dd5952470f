"""Pure functions that may take long or crash, by name: the runner calls them in a worker process under a limit."""

from collections.abc import Callable, Mapping
from typing import Any


def math_equal(answer: str, reference: str, float_digits: int = 6) -> dict[str, bool]:
    """Whether two expressions are equal, by math-verify (optional extra `verify`).

    Returns:
        `reference_read`, `answer_read`: whether each is an expression at all; `equal`.

    Raises:
        ImportError: math-verify is not installed.
    """
    from math_verify import LatexExtractionConfig, parse, verify  # 0.8 s, and only a worker needs it

    def read(text: str) -> list[Any]:
        # The worker's own limit stops it: math-verify would use signals, which only a main thread may.
        found: list[Any] = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
        return [item for item in found if not isinstance(item, str)]

    wanted = read(reference)
    if not wanted:
        return {"reference_read": False, "answer_read": True, "equal": False}
    found = read(answer)
    if not found:
        return {"reference_read": True, "answer_read": False, "equal": False}
    equal = bool(verify(wanted, found, float_rounding=float_digits, timeout_seconds=None))
    return {"reference_read": True, "answer_read": True, "equal": equal}


COMPUTATIONS: Mapping[str, Callable[..., Any]] = {"math_equal": math_equal}
"""Each takes keyword arguments of builtins and returns builtins."""
