"""The candidate as the examiner sees it: objects that stay with it, and its process."""

from __future__ import annotations

import builtins
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from .pipe import WHY_MAX_CHARACTERS, Gone, decode, encode, message_of, receive, send, why_of


class Unsupported(BaseException):
    """A test hands over what cannot cross the pipe: our limit, not the candidate's fault."""


class Remote:
    """An object that stays with the candidate. Never equal to anything but itself."""

    __slots__ = ("_body", "_child")
    _body: dict[str, int]
    _child: Child

    def __init__(self, child: Child, body: dict[str, Any]) -> None:
        object.__setattr__(self, "_child", child)
        object.__setattr__(self, "_body", {"id": int(body["id"])})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._child.ask("getattr", self, [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._child.ask("setattr", self, [name, value])

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._child.ask("call", self, list(args), keywords)

    def __getitem__(self, key: Any) -> Any:
        return self._child.ask("getitem", self, [key])

    def __len__(self) -> Any:
        return plain(self._child.ask("len", self, []), int)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._child.ask("iter", self, [])
        while True:
            try:
                item = self._child.ask("next", iterator, [])
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        return self._child.ask("next", self, [])

    def __str__(self) -> Any:
        return plain(self._child.ask("str", self, []), str)

    def __repr__(self) -> Any:
        return plain(self._child.ask("repr", self, []), str)

    def __bool__(self) -> bool:
        return True


def plain(value: Any, kind: type) -> Any:
    """The value, where it is of the kind that Python demands here."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


class Child:
    """The candidate's process, as the examiner talks to it."""

    def __init__(self, call_s: float) -> None:
        self.call_s = call_s
        self.gone = ""
        self.unsupported = ""
        self.callbacks: list[Any] = []
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", sys.argv[0], "candidate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def prepare(self, setup: str) -> None:
        """Run the tests' own setup, before anything of the candidate has run: what goes wrong is not its fault."""
        try:
            self._exchange({"operation": "setup", "code": setup})
        except (Exception, Gone) as error:
            self.unsupported = f"the setup of the tests fails: {why_of(error)}"
            raise Unsupported(self.unsupported) from None

    def load(self, code: str) -> tuple[list[str], list[tuple[str, Any]]]:
        """Run the candidate's module; its public names and imported modules."""
        told = self._exchange({"operation": "load", "code": code})
        # The child says what it likes: a name like `__builtins__` would put its word in place of every builtin.
        names = [name for name in told["names"] if is_public(name)]
        return names, [(name, module) for name, module in told["modules"] if is_public(name)]

    def named(self, name: str) -> Any:
        """What the candidate's module holds under a name."""
        return self._value(self._exchange({"operation": "name", "name": name}))

    def ask(self, operation: str, target: Any, arguments: list[Any], keywords: dict[str, Any] | None = None) -> Any:
        """One operation on an object of the candidate."""
        request = {
            "operation": operation,
            "target": encode(target, self._refer),
            "arguments": encode(arguments, self._refer),
            "keywords": encode(keywords or {}, self._refer),
        }
        told = self._exchange(request)
        if "arguments" in told:
            write_back(arguments, self._decoded(told["arguments"]))
        return self._value(told)

    def end(self) -> None:
        """Kill what is left."""
        self.process.kill()
        self.process.wait()

    def _refer(self, value: Any) -> dict[str, int]:
        if isinstance(value, Remote):
            body: dict[str, int] = object.__getattribute__(value, "_body")
            return body
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        self.unsupported = f"a test hands over a {type(value).__name__}"
        raise Unsupported(self.unsupported)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.gone:
            raise Gone(self.gone)
        until_s = time.monotonic() + self.call_s
        try:
            self._send(request)
            told = self._receive(until_s)
            while isinstance(told, dict) and "callback" in told:
                self._send(self._called_back(told))
                told = self._receive(until_s)
            if not isinstance(told, dict):
                raise Gone("it answered nonsense")
        except (Gone, OSError, ValueError, RecursionError) as error:
            self.gone = f"the code gave no answer: {message_of(error)}"
            self.end()
            raise Gone(self.gone) from None
        if "raised" in told:
            raise self._exception(told)
        return told

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        send(self.process.stdin.fileno(), message)

    def _receive(self, until_s: float) -> Any:
        assert self.process.stdout is not None
        return receive(self.process.stdout.fileno(), until_s)

    def _called_back(self, told: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self.callbacks[int(told["callback"])]
            return {"value": encode(function(*self._decoded(told["args"])), self._refer)}
        except Exception as error:
            return {"raised": message_of(error)}

    def _value(self, told: dict[str, Any]) -> Any:
        return self._decoded(told.get("value"))

    def _decoded(self, told: Any) -> Any:
        try:
            return decode(told, lambda body: Remote(self, body))
        except Exception as error:
            raise ValueError(f"the code answered what is no value: {message_of(error)}") from None

    def _exception(self, told: dict[str, Any]) -> Exception:
        why = str(told.get("why"))[:WHY_MAX_CHARACTERS]
        for name in told["raised"] if isinstance(told["raised"], list) else []:
            kind = getattr(builtins, name, None) if isinstance(name, str) else None
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
                return kind(why)
        return RuntimeError(why)


def is_public(name: Any) -> bool:
    """Whether it is a name that a module may give to its tests."""
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def write_back(arguments: list[Any], after: Any) -> None:
    """Give the arguments of a call the contents that the candidate left in them."""
    if not isinstance(after, list) or len(after) != len(arguments):
        return
    for mine, left in zip(arguments, after):  # noqa: B905 (the lengths are equal, and old Pythons have no strict)
        if type(mine) is not type(left):
            continue
        if isinstance(mine, (list, bytearray)):
            mine[:] = left
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(left)
