"""The candidate's side: its process. Everything here is at the candidate's mercy."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from .pipe import Gone, decode, encode, message_of, receive, send


def candidate() -> None:
    """Serve calls of the examiner. Whatever the candidate does to this process, only plain data leaves it."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    held: list[Any] = []

    def refer(value: Any) -> Any:
        held.append(value)
        return {"id": len(held) - 1, "callable": callable(value)}

    def resolve(body: Any) -> Any:
        if "callback" in body:
            return lambda *args: ask_back(body["callback"], args)
        return held[body["id"]]

    def ask_back(number: Any, args: tuple[Any, ...]) -> Any:
        send(answers, {"callback": number, "args": encode(list(args), refer)})
        told = receive(requests)
        if "raised" in told:
            raise RuntimeError(told["raised"])
        return decode(told["value"], resolve)

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    while True:
        try:
            request = receive(requests)
        except Gone:
            return
        try:
            answer = serve(request, module, lambda told: decode(told, resolve), lambda value: encode(value, refer))
        except BaseException as error:
            answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "why": message_of(error)}
        try:
            send(answers, answer)
        except (TypeError, ValueError, RecursionError) as error:
            send(answers, {"raised": ["ValueError", "Exception"], "why": message_of(error)})


def serve(
    request: Any, module: types.ModuleType, decoded: Callable[[Any], Any], encoded: Callable[[Any], Any]
) -> dict[str, Any]:
    """Carry out one request of the examiner."""
    space = module.__dict__
    operation = request["operation"]
    if operation == "setup":
        exec(compile(request["code"], "<setup>", "exec"), space)
        return {}
    if operation == "load":
        exec(compile(request["code"], "<solution>", "exec"), space)
        mine = [(name, item) for name, item in space.items() if isinstance(name, str) and not name.startswith("__")]
        return {
            "names": [name for name, item in mine if not isinstance(item, types.ModuleType)],
            "modules": [[name, item.__name__] for name, item in mine if isinstance(item, types.ModuleType)],
        }
    if operation == "name":
        return {"value": encoded(space[request["name"]])}
    target = decoded(request["target"])
    arguments = decoded(request["arguments"])
    keywords = decoded(request["keywords"])
    operations: dict[str, Callable[[], Any]] = {
        "call": lambda: target(*arguments, **keywords),
        "getattr": lambda: getattr(target, *arguments),
        "setattr": lambda: setattr(target, *arguments),
        "getitem": lambda: target[arguments[0]],
        "len": lambda: len(target),
        "iter": lambda: iter(target),
        "next": lambda: next(target),
        "str": lambda: str(target),
        "repr": lambda: repr(target),
    }
    answer = {"value": encoded(operations[operation]())}
    if operation == "call" and any(isinstance(item, (list, dict, set, bytearray)) for item in arguments):
        answer["arguments"] = encoded(arguments)
    return answer
