"""Tests so plain that no sandbox is needed to pass them: `assert f(literals) == literal`.

The calls are evaluated in the interpreter without files, network or imports; what is expected stays here, and the
comparison happens here, on builtins. So this, too, cannot be forged. Only a pass is taken from it: the interpreter
knows a part of Python, and whatever else it says is for the sandbox to find out.
"""

import ast
from typing import Any, NamedTuple

from .check import Finding, FindingStatus, RunSmallPython

TESTS_MAX = 100
TEXT_MAX_CHARACTERS = 20_000


class SmallTests(NamedTuple):
    """Calls to evaluate, and what each must be."""

    calls: tuple[str, ...]
    expected: tuple[Any, ...]

    def check(self, code: str, wall_s: float) -> RunSmallPython:
        """Evaluate all calls after the code."""
        return RunSmallPython(source=f"{code}\n[{', '.join(self.calls)}]\n", wall_s=wall_s)

    def are_passed_by(self, finding: Finding) -> bool:
        """Whether every call gave what it must."""
        if finding.status is not FindingStatus.OK or finding.killed or not isinstance(finding.value, list):
            return False
        if len(finding.value) != len(self.expected):
            return False
        return all(bool(found == wanted) for found, wanted in zip(finding.value, self.expected, strict=True))


def small_tests(tests: list[str]) -> SmallTests | None:
    """The tests as calls and values; None where one of them is more than that.

    >>> small_tests(["assert add(2, 3) == 5"])
    SmallTests(calls=('add(2, 3)',), expected=(5,))
    >>> small_tests(["assert abs(add(2, 3)) == 5"]) is None
    True
    """
    if sum(len(text) for text in tests) > TEXT_MAX_CHARACTERS:
        return None
    calls: list[str] = []
    expected: list[Any] = []
    for text in tests:
        try:
            statements = ast.parse(text).body
            for statement in statements:
                call, wanted = _parts(statement)
                calls.append(call)
                expected.append(wanted)
        except (ValueError, SyntaxError, RecursionError, TypeError, MemoryError):
            return None
    return SmallTests(tuple(calls), tuple(expected)) if 0 < len(calls) <= TESTS_MAX else None


def _parts(statement: ast.stmt) -> tuple[str, Any]:
    """A call and its value.

    Raises:
        ValueError: the statement is no such assertion.
    """
    if not (isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)):
        raise ValueError("no comparison is asserted")
    compared = statement.test
    call = compared.left
    if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq):
        raise ValueError("no equality is asserted")
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise ValueError("no plain call is compared")
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        ast.literal_eval(argument)
    return ast.unparse(call), ast.literal_eval(compared.comparators[0])
