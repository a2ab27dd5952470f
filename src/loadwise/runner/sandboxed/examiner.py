"""Run unit tests against code that nobody trusts, so that the code cannot forge its marks.

*Theory of operation.* Two processes in one sandbox. The examiner (this process) holds the tests, and alone writes the
report. The candidate's code runs in a child. It never sees a test, only the arguments of one call at a time, and
answers with plain data over a pipe. Every assertion is evaluated here, on values rebuilt from that data as exact
builtins: an object that is equal to everything, an overwritten `abs`, `os._exit(0)`, an `atexit` hook or a forged
report line reach nothing that decides. The examiner makes itself undumpable, so that a child of the same user cannot
read or write its memory or its descriptors; where it cannot, the report says so. The candidate may still kill or stop
us: then there is no report after the line `started`, which counts as its failure, not as ours.

Left over: objects of the candidate's own classes stay with it, and their answers (attributes, iteration) are its word,
as they would be in one process. Two of them are never equal here.

Input: one JSON object on stdin (see `verify/unit_tests.py`). Output: JSON lines, each with the nonce.
Standard library only: it runs under whatever Python the sandbox has.
"""

import ast
import builtins
import collections
import contextlib
import ctypes
import decimal
import fractions
import importlib
import io
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
import types
import unittest

FRAME_MAX_BYTES = 4 << 20
WHY_MAX_CHARACTERS = 300
ALARM_AGAIN_S = 1.0
"""A test may swallow the alarm; it rings again."""
MODULES = {"bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"}
MODULES |= {"itertools", "math", "operator", "random", "re", "string", "sys", "typing"}
"""What the tests may find imported because the candidate imported it."""


class Unsupported(BaseException):
    """A test hands over what cannot cross the pipe: our limit, not the candidate's fault."""


class Expired(BaseException):
    """The time for all tests is over."""


class Gone(BaseException):
    """The candidate's process ended, went silent or talks nonsense. No test may take it for an exception of the
    code."""


# ---- what crosses the pipe: both sides


def encode(value, refer):
    """A value as JSON: builtins by value, all else by `refer(value)`."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"i": format(int.__index__(value), "x")}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "ba": bytes(value).hex()}
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"), (collections.deque, "q")):
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if isinstance(value, decimal.Decimal):
        return {"D": str(value)}
    if isinstance(value, fractions.Fraction):
        return {"F": [format(value.numerator, "x"), format(value.denominator, "x")]}
    return {"o": refer(value)}


def decode(told, resolve):
    """The value that JSON tells of; it holds exact builtins and what `resolve` makes of references."""
    if told is None or isinstance(told, (bool, str)):
        return told
    ((tag, body),) = told.items()
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag == "c":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if tag in ("b", "ba"):
        return bytes.fromhex(body) if tag == "b" else bytearray.fromhex(body)
    if tag == "d":
        return {decode(key, resolve): decode(item, resolve) for key, item in body}
    if tag == "r":
        return range(*(int(part) for part in body))
    if tag == "D":
        return decimal.Decimal(body)
    if tag == "F":
        return fractions.Fraction(int(body[0], 16), int(body[1], 16))
    if tag == "o":
        return resolve(body)
    kind = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}[tag]
    return kind([decode(item, resolve) for item in body])


def send(descriptor, message):
    """Write one frame."""
    body = json.dumps(message).encode()
    if len(body) > FRAME_MAX_BYTES:
        raise ValueError(f"a value of {len(body)} bytes is too long; {FRAME_MAX_BYTES} is the limit")
    view = memoryview(struct.pack(">I", len(body)) + body)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor, until_s=None):
    """Read one frame; Gone where it does not come, or is none."""
    return json.loads(read_exactly(descriptor, length_of(read_exactly(descriptor, 4, until_s)), until_s))


def length_of(head):
    """The length that a frame's head tells."""
    (length,) = struct.unpack(">I", head)
    if length > FRAME_MAX_BYTES:
        raise Gone(f"it answered {length} bytes; {FRAME_MAX_BYTES} is the limit")
    return length


def read_exactly(descriptor, count, until_s):
    """Read `count` bytes before the deadline."""
    parts = []
    while count:
        if until_s is not None:
            ready, _, _ = select.select([descriptor], [], [], max(until_s - time.monotonic(), 0.0))
            if not ready:
                raise Gone("it did not answer in time")
        part = os.read(descriptor, min(count, 1 << 16))
        if not part:
            raise Gone("its process ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# ---- the candidate's side: everything here is at the candidate's mercy


def candidate():
    """Serve calls of the examiner. Whatever the candidate does to this process, only plain data leaves it."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    held = []

    def refer(value):
        held.append(value)
        return {"id": len(held) - 1, "callable": callable(value)}

    def resolve(body):
        if "callback" in body:
            return lambda *args: ask_back(body["callback"], args)
        return held[body["id"]]

    def ask_back(number, args):
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


def serve(request, module, decoded, encoded):
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
    value = {
        "call": lambda: target(*arguments, **keywords),
        "getattr": lambda: getattr(target, *arguments),
        "setattr": lambda: setattr(target, *arguments),
        "getitem": lambda: target[arguments[0]],
        "len": lambda: len(target),
        "iter": lambda: iter(target),
        "next": lambda: next(target),
        "str": lambda: str(target),
        "repr": lambda: repr(target),
    }[operation]()
    answer = {"value": encoded(value)}
    if operation == "call" and any(isinstance(item, (list, dict, set, bytearray)) for item in arguments):
        answer["arguments"] = encoded(arguments)
    return answer


def message_of(error):
    """What an exception says, whatever its own methods do."""
    try:
        return str(error)[:WHY_MAX_CHARACTERS]
    except BaseException:
        return "an exception whose text cannot be read"


# ---- the examiner's side


class Remote:
    """An object that stays with the candidate. Never equal to anything but itself."""

    __slots__ = ("_body", "_child")

    def __init__(self, child, body):
        object.__setattr__(self, "_child", child)
        object.__setattr__(self, "_body", {"id": int(body["id"])})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._child.ask("getattr", self, [name])

    def __setattr__(self, name, value):
        self._child.ask("setattr", self, [name, value])

    def __call__(self, *args, **keywords):
        return self._child.ask("call", self, list(args), keywords)

    def __getitem__(self, key):
        return self._child.ask("getitem", self, [key])

    def __len__(self):
        return plain(self._child.ask("len", self, []), int)

    def __iter__(self):
        iterator = self._child.ask("iter", self, [])
        while True:
            try:
                item = self._child.ask("next", iterator, [])
            except StopIteration:
                return
            yield item

    def __next__(self):
        return self._child.ask("next", self, [])

    def __str__(self):
        return plain(self._child.ask("str", self, []), str)

    def __repr__(self):
        return plain(self._child.ask("repr", self, []), str)

    def __bool__(self):
        return True


def plain(value, kind):
    """The value, where it is of the kind that Python demands here."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


class Child:
    """The candidate's process, as the examiner talks to it."""

    def __init__(self, call_s):
        self.call_s = call_s
        self.gone = ""
        self.unsupported = ""
        self.callbacks = []
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", os.path.abspath(__file__), "candidate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def prepare(self, setup):
        """Run the tests' own setup, before anything of the candidate has run: what goes wrong is not its fault."""
        try:
            self._exchange({"operation": "setup", "code": setup})
        except (Exception, Gone) as error:
            self.unsupported = f"the setup of the tests fails: {why_of(error)}"
            raise Unsupported(self.unsupported) from None

    def load(self, code):
        """Run the candidate's module; its public names and imported modules."""
        told = self._exchange({"operation": "load", "code": code})
        names = [name for name in told["names"] if isinstance(name, str)]
        modules = [(name, module) for name, module in told["modules"] if isinstance(name, str)]
        return names, modules

    def named(self, name):
        """What the candidate's module holds under a name."""
        return self._value(self._exchange({"operation": "name", "name": name}))

    def ask(self, operation, target, arguments, keywords=None):
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

    def end(self):
        """Kill what is left."""
        self.process.kill()
        self.process.wait()

    def _refer(self, value):
        if isinstance(value, Remote):
            return object.__getattribute__(value, "_body")
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        self.unsupported = f"a test hands over a {type(value).__name__}"
        raise Unsupported(self.unsupported)

    def _exchange(self, request):
        if self.gone:
            raise Gone(self.gone)
        until_s = time.monotonic() + self.call_s
        try:
            self._send(request)
            told = receive(self.process.stdout.fileno(), until_s)
            while isinstance(told, dict) and "callback" in told:
                self._send(self._called_back(told))
                told = receive(self.process.stdout.fileno(), until_s)
            if not isinstance(told, dict):
                raise Gone("it answered nonsense")
        except (Gone, OSError, ValueError, RecursionError) as error:
            self.gone = f"the code gave no answer: {message_of(error)}"
            self.end()
            raise Gone(self.gone) from None
        if "raised" in told:
            raise self._exception(told)
        return told

    def _send(self, message):
        send(self.process.stdin.fileno(), message)

    def _called_back(self, told):
        try:
            function = self.callbacks[int(told["callback"])]
            return {"value": encode(function(*self._decoded(told["args"])), self._refer)}
        except Exception as error:
            return {"raised": message_of(error)}

    def _value(self, told):
        return self._decoded(told.get("value"))

    def _decoded(self, told):
        try:
            return decode(told, lambda body: Remote(self, body))
        except Exception as error:
            raise ValueError(f"the code answered what is no value: {message_of(error)}") from None

    def _exception(self, told):
        why = str(told.get("why"))[:WHY_MAX_CHARACTERS]
        for name in told["raised"] if isinstance(told["raised"], list) else []:
            kind = getattr(builtins, name, None) if isinstance(name, str) else None
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
                return kind(why)
        return RuntimeError(why)


def write_back(arguments, after):
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


class Examination:
    """All tests of one case."""

    def __init__(self, paper):
        self.paper = paper
        self.results = []
        self.unparsable = ""
        self.child = None

    @property
    def unsupported(self):
        """Why the tests cannot be run by us; empty where they can."""
        return self.unparsable or (self.child.unsupported if self.child else "")

    def run(self):
        """Load the candidate and run every test."""
        self.child = Child(self.paper["call_s"])
        try:
            space = self._space()
        except (Exception, Gone, Unsupported) as error:
            self._note("load", why_of(error))
            return
        for number, source in enumerate(self.paper["tests"], 1):
            self._source(f"test {number}", source, space)

    def _space(self):
        """What the tests see: their own setup, then the candidate's names, none of which may hide a builtin."""
        if self.paper["setup"]:
            self.child.prepare(self.paper["setup"])
        names, modules = self.child.load(self.paper["code"])
        space = {"__name__": "tests", "__builtins__": builtins}
        entry = self.paper["entry_point"]
        for name, module in modules:
            if module in MODULES and not hasattr(builtins, name):
                space[name] = importlib.import_module(module)
        theirs = {}
        for name in names:
            if name in MODULES and name != entry:
                space[name] = importlib.import_module(name)  # or `math.isclose` would be the candidate's word
            elif not hasattr(builtins, name) or name == entry:
                theirs[name] = self.child.named(name)
        solution = types.ModuleType("solution")
        solution.__dict__.update(theirs)
        sys.modules["solution"] = solution
        space.update(theirs)
        if entry:
            if entry not in theirs:
                raise NameError(f"the code does not define {entry!r}")
            space["candidate"] = theirs[entry]
        return space

    def _source(self, name, source, space):
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
            if (
                not self._attempt(label, lambda program=program: exec(program, space), counts=is_assert)
                and not is_assert
            ):
                return
        for label, function in self._functions(space, before):
            self._attempt(f"{name}, {label}", function, counts=True)

    def _lacks(self, statement):
        """Whether the tests import what is not here, which is not the candidate's fault."""
        wanted = []
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

    def _functions(self, space, before):
        made = [(key, item) for key, item in space.items() if before.get(key) is not item]
        for key, item in made:
            if key == "check" and isinstance(item, types.FunctionType) and self.paper["entry_point"]:
                yield key, lambda item=item: item(space["candidate"])
            elif key.startswith("test") and isinstance(item, types.FunctionType):
                if item.__code__.co_argcount + item.__code__.co_kwonlyargcount:
                    self.unparsable = f"{key} asks for arguments, as fixtures of pytest do"
                else:
                    yield key, item
            elif isinstance(item, type) and issubclass(item, unittest.TestCase):
                for case in unittest.defaultTestLoader.loadTestsFromTestCase(item):
                    yield case.id(), lambda case=case: run_case(case)

    def _attempt(self, label, function, counts):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                function()
        except Expired:
            raise
        except BaseException as error:
            self._note(label, why_of(error))
            return False
        if self.child.gone:
            self._note(label, self.child.gone)
            return False
        if counts:
            self._note(label, "")
        return True

    def _note(self, label, why):
        self.results.append([label, why[:WHY_MAX_CHARACTERS]])


def asserts(statement):
    """Whether a statement is a test by itself: an assertion, or a loop or block that holds one."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def run_case(case):
    """Run one unittest case; raise what it noted."""
    result = unittest.TestResult()
    case.run(result)
    for _, text in [*result.errors, *result.failures]:
        raise AssertionError(text.strip().rsplit("\n", 1)[-1])
    if result.skipped or result.unexpectedSuccesses or result.testsRun != 1:
        raise AssertionError("the test was skipped")


def why_of(error):
    """An exception in one line."""
    text = message_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run_scripts(paper, results):
    """Run the candidate as a program, once for each pair of input and expected output."""
    path = os.path.join(os.getcwd(), "solution.py")
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(paper["code"])
    for number, pair in enumerate(paper["pairs"], 1):
        results.append([f"pair {number}", run_script(path, pair, paper["call_s"])[:WHY_MAX_CHARACTERS]])


def run_script(path, pair, call_s):
    """Why one run is wrong; empty where it is right."""
    with open(os.path.join(os.getcwd(), ".stdout"), "w+b") as out:  # a file has a size limit, a pipe has not
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", path],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
            with contextlib.suppress(BrokenPipeError):
                process.communicate(pair["input"].encode(), timeout=call_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"it took longer than {call_s} s"
        out.seek(0)
        found = out.read(FRAME_MAX_BYTES + 1)
    if process.returncode:
        return f"it ended with {process.returncode}"
    if len(found) > FRAME_MAX_BYTES:
        return f"it printed more than {FRAME_MAX_BYTES} bytes"
    same = lines_of(found.decode("utf-8", "replace")) == lines_of(pair["output"])
    return "" if same else f"it printed {found[:80]!r}"


def lines_of(text):
    """Lines without the blanks at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def shield():
    """Whether a process of the same user is kept from our memory: undumpable, and without rights over others."""
    try:
        undumpable = ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
        with open("/proc/self/status", encoding="ascii") as file:
            rights = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    except (OSError, AttributeError, StopIteration, ValueError):
        return False
    return undumpable and not rights & (1 << 19)  # CAP_SYS_PTRACE


class Alarm:
    """The alarm of all tests; it stays set where a test swallows it."""

    is_set = False

    def __call__(self, number, frame):
        self.is_set = True
        raise Expired


def main():
    """Read the paper, examine, report."""
    paper = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)

    def say(**fields):
        os.write(report, json.dumps({"nonce": paper["nonce"], **fields}).encode() + b"\n")

    say(started=True, shielded=shield())
    examination = Examination(paper)
    alarm = Alarm()
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, paper["total_s"], ALARM_AGAIN_S)
    try:
        if paper["pairs"]:
            run_scripts(paper, examination.results)
        else:
            examination.run()
    except Expired:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    if examination.child is not None:
        examination.child.end()
    results = examination.results
    wrong = [result for result in results if result[1]]
    say(
        finished=True,
        expired=alarm.is_set,
        unsupported=examination.unsupported[:200],
        n_tests=len(results),
        n_wrong=len(wrong),
        wrong=wrong[:20],
    )


if __name__ == "__main__":
    candidate() if sys.argv[1:] == ["candidate"] else main()
