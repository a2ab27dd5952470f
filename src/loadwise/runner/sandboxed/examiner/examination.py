"""The tests of one case, run against the candidate; every assertion is evaluated here."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .pipe import WHY_MAX_CHARACTERS, Gone, message_of, why_of
from .remote import Child, Unsupported

MODULES = {"bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"}
MODULES |= {"itertools", "math", "operator", "random", "re", "string", "sys", "typing"}
"""What the tests may find imported because the candidate imported it."""


class Expired(BaseException):
    """The time for all tests is over."""


class Examination:
    """All tests of one case."""

    def __init__(self, paper: dict[str, Any]) -> None:
        self.paper = paper
        self.results: list[list[str]] = []
        self.unparsable = ""
        self.child: Child | None = None

    @property
    def unsupported(self) -> str:
        """Why the tests cannot be run by us; empty where they can."""
        return self.unparsable or (self.child.unsupported if self.child else "")

    def run(self) -> None:
        """Load the candidate and run every test."""
        child = self.child = Child(self.paper["call_s"])
        try:
            space = self._space(child)
        except (Exception, Gone, Unsupported) as error:
            self._note("load", why_of(error))
            return
        for number, source in enumerate(self.paper["tests"], 1):
            self._source(child, f"test {number}", source, space)

    def _space(self, child: Child) -> dict[str, Any]:
        """What the tests see: their own setup, then the candidate's names, none of which may hide a builtin."""
        if self.paper["setup"]:
            child.prepare(self.paper["setup"])
        names, modules = child.load(self.paper["code"])
        space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        entry = self.paper["entry_point"]
        for name, module in modules:
            if module in MODULES and not hasattr(builtins, name):
                space[name] = importlib.import_module(module)
        theirs: dict[str, Any] = {}
        for name in names:
            if name in MODULES and name != entry:
                space[name] = importlib.import_module(name)  # or `math.isclose` would be the candidate's word
            elif not hasattr(builtins, name) or name == entry:
                theirs[name] = child.named(name)
        solution = types.ModuleType("solution")
        solution.__dict__.update(theirs)
        sys.modules["solution"] = solution
        space.update(theirs)
        if entry:
            if entry not in theirs:
                raise NameError(f"the code does not define {entry!r}")
            space["candidate"] = theirs[entry]
        return space

    def _source(self, child: Child, name: str, source: str, space: dict[str, Any]) -> None:
        """Run one text of tests: its assertions, its `check`, its functions, its test cases."""
        before = dict(space)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError) as error:
            self.unparsable = f"{name} cannot be parsed: {message_of(error)}"
            return
        for statement in tree.body:
            is_assert = asserts(statement)
            label = f"{name}, line {statement.lineno}"
            program = compile(ast.Module([statement], []), f"<{name}>", "exec")
            if self._lacks(statement):
                return
            went_well = self._attempt(child, label, partial(exec, program, space), counts=is_assert)
            if not went_well and not is_assert:
                return
        for label, function in self._functions(space, before):
            self._attempt(child, f"{name}, {label}", function, counts=True)

    def _lacks(self, statement: ast.stmt) -> bool:
        """Whether the tests import what is not here, which is not the candidate's fault."""
        wanted: list[str] = []
        if isinstance(statement, ast.Import):
            wanted = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            wanted = [statement.module or ""]
        for name in wanted:
            if name.split(".")[0] == "solution":
                continue
            try:
                importlib.import_module(name)
            except (ImportError, ValueError) as error:
                self.unparsable = f"the tests import {name}: {message_of(error)}"
                return True
        return False

    def _functions(self, space: dict[str, Any], before: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        made = [(key, item) for key, item in space.items() if before.get(key) is not item]
        for key, item in made:
            if key == "check" and isinstance(item, types.FunctionType) and self.paper["entry_point"]:
                yield key, partial(item, space["candidate"])
            elif key.startswith("test") and isinstance(item, types.FunctionType):
                if item.__code__.co_argcount + item.__code__.co_kwonlyargcount:
                    self.unparsable = f"{key} asks for arguments, as fixtures of pytest do"
                else:
                    yield key, item
            elif isinstance(item, type) and issubclass(item, unittest.TestCase):
                for case in unittest.defaultTestLoader.loadTestsFromTestCase(item):
                    assert isinstance(case, unittest.TestCase)
                    yield case.id(), partial(run_case, case)

    def _attempt(self, child: Child, label: str, function: Callable[[], Any], counts: bool) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                function()
        except Expired:
            raise
        except BaseException as error:
            self._note(label, why_of(error))
            return False
        if child.gone:
            self._note(label, child.gone)
            return False
        if counts:
            self._note(label, "")
        return True

    def _note(self, label: str, why: str) -> None:
        self.results.append([label, why[:WHY_MAX_CHARACTERS]])


def asserts(statement: ast.stmt) -> bool:
    """Whether a statement is a test by itself: an assertion, or a loop or block that holds one."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def run_case(case: unittest.TestCase) -> None:
    """Run one unittest case; raise what it noted."""
    result = unittest.TestResult()
    case.run(result)
    for _, text in [*result.errors, *result.failures]:
        raise AssertionError(text.strip().rsplit("\n", 1)[-1])
    if result.skipped or result.unexpectedSuccesses or result.testsRun != 1:
        raise AssertionError("the test was skipped")
