"""Code by unit tests: the forms of HumanEval, MBPP, unittest and programs, and code that forges its marks."""

import json
import sys
from typing import Any

import msgspec
import pytest

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.work import Verdict, VerdictKind
from loadwise.verify.case import Case
from loadwise.verify.check import Finding, FindingStatus, RunInSandbox, RunSmallPython
from loadwise.verify.unit_tests import UnitTests, code_of, fenced
from loadwise.verify.verifier import Wanted
from tests.verify.carry import asked, carry_out, judged, told, verifier

PASS, FAIL, ABSTAIN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.ABSTAIN
CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0"


HASTY = {"call_s": 3.0, "total_s": 10.0}
"""For code that may hang."""


def coder(**options: Any) -> UnitTests:
    """The verifier, with this Python and limits that right code keeps on however slow a machine."""
    made = verifier(
        "code", python=[sys.executable], allow_unshielded=True, **{"call_s": 60.0, "total_s": 240.0, **options}
    )
    assert isinstance(made, UnitTests)
    return made


def grade(code: str, tests: str | list[str] = CHECK, entry: str = "add", **references: str) -> Verdict:
    """Run the tests against the code."""
    return graded_within({}, code, tests, entry, **references)


def graded_within(
    limits: dict[str, float], code: str, tests: str | list[str] = CHECK, entry: str = "add", **references: str
) -> Verdict:
    """The same under limits."""
    text = tests if isinstance(tests, str) else json.dumps(tests)
    case = Case(artefacts={"code": code}, references={"tests": text, "entry_point": entry, **references}, nonce="n1")
    return judged(coder(**limits), case)


def test_a_right_function_passes_and_a_wrong_one_fails() -> None:
    """The HumanEval form."""
    assert grade("def add(a, b):\n    return a + b").verdict is PASS
    wrong = grade("def add(a, b):\n    return a - b")
    assert wrong.verdict is FAIL and "1 of 1 tests failed" in wrong.explanation


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit",
        "import atexit, os\natexit.register(lambda: os._exit(0))",
        "def add(a, b):\n    raise AssertionError",
        "def add(a, b):\n    while True: pass",
        "def add(a, b):\n    return add(a, b)",
        "def add(a, b): return a +",
        "not python at all",
        "\x00",
        "\ud800",
        "x = " + "(" * 5000,
        "def other(a, b): return a + b",
        "add = None",
        "add = 5",
        "import re\ndef add(a, b): return re.match('(a+)+$', 'a' * 64 + 'b') or a + b",
    ],
)
def test_code_that_leaves_hangs_or_is_none_fails(code: str) -> None:
    """Leaving with success is no success."""
    assert graded_within(HASTY, code).verdict is FAIL


@pytest.mark.parametrize(
    "code",
    [
        # An object that is equal to everything, in several dresses.
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any(7)",
        "class Any(int):\n    def __index__(self): return 9\ndef add(a, b): return Any(7)",
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any()",
        "class Any(list):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any()",
        "class Any(float):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Any()",
        # Forged reports, on every stream that there is.
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"nonce": "n1", "finished": true}\\n\')\n'
        "    except OSError: pass\ndef add(a, b): return 0",
        'import sys\nprint(\'{"nonce": "n1", "finished": true, "n_tests": 1, "n_wrong": 0}\')\n'
        'sys.stderr.write("1 passed")\ndef add(a, b): return 0',
        # Overwritten tools of the tests.
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\n"
        "def add(a, b): return 0",
        "def add(a, b): return 0\ndef check(candidate): pass",
        "def add(a, b): return 0\ncandidate = lambda a, b: a + b",
        "import sys, types\nsys.modules['unittest'] = types.ModuleType('unittest')\ndef add(a, b): return 0",
        # The tests are nowhere to be read.
        "import sys, gc, glob\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'candidate' in frame.f_locals and callable(frame.f_locals.get('check')): return a + b\n"
        "        frame = frame.f_back\n    return 0",
        "import os\ndef add(a, b):\n    for name in ('/proc/self/fd/0', '/proc/%d/fd/0' % os.getppid(), "
        "'/proc/%d/cmdline' % os.getppid()):\n        try:\n"
        "            if 'assert' in open(name).read(): return a + b\n        except OSError: pass\n    return 0",
        # The examiner is killed or stopped.
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGALRM)\ndef add(a, b): return 0",
    ],
)
def test_forged_passes_do_not_count(code: str) -> None:
    """Whatever the code does to its own process, wrong values stay wrong."""
    assert grade(code).verdict is FAIL


TAKEN_OVER = """
from examiner import candidate
def add(*args): return 0
def check(request, *others):
    if request["operation"] == "name" and request["name"] != "add":
        return {"value": {"d": [[key, {"o": {"id": 0, "callable": True}}] for key in ("abs", "AssertionError", "len")]}}
    return serve(request, *others)
def told(descriptor, message):
    candidate.send = send
    send(descriptor, {"names": NAMES, "modules": MODULES})
serve, send = candidate.serve, candidate.send
candidate.serve, candidate.send = check, told
NAMES = MODULES = None
"""


@pytest.mark.parametrize(
    ("names", "modules", "test"),
    [
        (["add", "__builtins__"], [], "assert abs(add(2, 3) - 5) < 1"),
        (["add"], [["__builtins__", "math"]], "assert abs(add(2, 3) - 5) < 1"),
        (["add", "__name__", "__debug__"], [], "assert add(2, 3) == 5"),
        (["add", "math"], [], "assert math.isclose(add(2, 3), 5)"),
        (["add", 7, None, ["x"], "a b"], [[7, 7], ["sys", []]], "assert add(2, 3) == 5"),
        ("add", {"x": 1}, "assert add(2, 3) == 5"),
    ],
)
def test_code_that_takes_over_its_side_of_the_pipe_hides_no_builtin(names: Any, modules: Any, test: str) -> None:
    """What the candidate's process says of its own names is its word, and may be anything."""
    said = f"NAMES = {names!r}\nMODULES = {modules!r}\n"
    code = TAKEN_OVER.replace("NAMES = MODULES = None\n", said)
    assert grade(code, [test], entry="").verdict is FAIL


def test_names_of_the_code_hide_no_tool_of_the_tests() -> None:
    """An overwritten `abs`, or a `math` of the code's own, decides nothing."""
    code = "def add(a, b): return 99\ndef abs(x): return 0\nclass math:\n    isclose = staticmethod(lambda a, b: True)"
    for test in ("assert abs(add(1, 1) - 2) < 1", "assert math.isclose(add(1, 1), 2)"):
        assert grade(code, [test], entry="").verdict is FAIL
    right = "import math\ndef add(a, b): return a + b"
    assert grade(right, ["assert math.isclose(add(1, 1), 2)"], entry="").verdict is PASS


def test_each_assertion_of_mbpp_counts_alone() -> None:
    """The share of passed tests is the score only where it is asked for."""
    code = "def double(x):\n    return 4"
    tests = ["assert double(2) == 4", "assert double(3) == 6"]
    assert grade(code, tests, entry="").score == 0.0
    case = Case(artefacts={"code": code}, references={"tests": json.dumps(tests)})
    assert judged(coder(partial=True), case).score == 0.5
    assert grade("def double(x):\n    return 2 * x", tests, entry="").verdict is PASS


NODE = "class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef f(n): return n.left.v"
PAIR = "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(p): return p.a + p.b"
BOX = "class Box:\n    def __len__(self): return 3\n    def __getitem__(self, i): return i * 2"
EACH = "(x, [x], {x: {1, 2}}, None, True, 1.5, 'é', b'a', 2j)"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (f"def f(x): return {EACH}", f"f(1) == (lambda x: {EACH})(1)"),
        ("def f(): return 10 ** 5000", "f() == 10 ** 5000"),
        ("def f(): return float('inf')", "f() == float('inf')"),
        ("def f(): return float('nan')", "f() != f()"),
        ("def f(n): return (i * i for i in range(n))", "list(f(3)) == [0, 1, 4]"),
        ("import itertools\ndef f(): return itertools.count()", "next(f()) == 0"),
        ("def f(n): return range(n)", "f(3) == range(3)"),
        ("from collections import Counter\ndef f(): return Counter('aab')", "f() == {'a': 2, 'b': 1}"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "3 * f() == 1"),
        ("def f(x): return lambda y: x + y", "f(2)(3) == 5"),
        ("def f(items, key): return sorted(items, key=key)", "f([3, -1, 2], lambda v: -v) == [3, 2, -1]"),
        ("def f(items, kind): return [kind(item) for item in items]", "f([1, 2], str) == ['1', '2']"),
        (PAIR, "f(Pair(1, 2)) == 3"),
        (NODE, "(lambda n: (setattr(n, 'left', Node(7)), f(n))[1])(Node(1)) == 7"),
        (BOX, "len(Box()) == 3 and Box()[2] == 4"),
        ("class Box:\n    def __str__(self): return 'box'", "str(Box()) == 'box'"),
    ],
)
def test_values_of_all_kinds_cross(code: str, test: str) -> None:
    """Builtins arrive as themselves; iterators, functions and objects stay and can be used."""
    found = grade(code, [f"assert {test}"], entry="")
    assert found.verdict is PASS, found.evidence


def test_arguments_changed_in_place_are_seen() -> None:
    """As in one process."""
    code = "def f(items, table):\n    items.sort()\n    table['n'] = len(items)"
    test = "items, table = [3, 1], {}\nf(items, table)\nassert items == [1, 3] and table == {'n': 2}"
    assert grade(code, test, entry="").verdict is PASS


def test_exceptions_keep_their_kind() -> None:
    """A test may expect one, and no other; the end of the process is no exception that it may expect."""
    test = "raised = ''\ntry:\n    f()\nexcept {kind}:\n    raised = '{kind}'\nassert raised == '{kind}'"
    assert grade("def f(): raise ValueError('no')", test.format(kind="ValueError"), entry="").verdict is PASS
    assert (
        grade("class Mine(KeyError): pass\ndef f(): raise Mine", test.format(kind="KeyError"), entry="").verdict is PASS
    )
    assert grade("def f(): raise ValueError('no')", test.format(kind="KeyError"), entry="").verdict is FAIL
    assert grade("import os\ndef f(): os._exit(1)", test.format(kind="Exception"), entry="").verdict is FAIL
    assert grade("import os\ndef f(): os._exit(1)", test.format(kind="BaseException"), entry="").verdict is FAIL


def test_unittest_and_pytest_functions_are_run() -> None:
    """Classes of unittest and functions called test_ count one by one; the module is importable as `solution`."""
    tests = (
        "import unittest\nfrom solution import add\n"
        "class T(unittest.TestCase):\n    def test_a(self): self.assertEqual(add(1, 2), 3)\n"
        "    def test_b(self): self.assertEqual(add(1, 1), {b})\n"
        "def test_c():\n    assert add(0, 0) == 0\n"
    )
    good = grade("def add(a, b): return a + b", tests.format(b=2), entry="")
    assert good.verdict is PASS and "3 of 3" in good.explanation
    bad = grade("def add(a, b): return a + b", tests.format(b=3), entry="")
    assert bad.verdict is FAIL and "1 of 3" in bad.explanation
    skipped = tests.format(b=2).replace("def test_a(self):", "@unittest.skip('x')\n    def test_a(self):")
    assert grade("def add(a, b): return a + b", skipped, entry="").verdict is FAIL


def test_programs_with_input_and_output() -> None:
    """Each pair is a run of its own; blanks at the ends of lines do not count."""
    pairs = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}])

    def run(code: str, **limits: float) -> VerdictKind:
        return judged(coder(**limits), Case(artefacts={"code": code}, references={"pairs": pairs})).verdict

    assert run("print(sum(map(int, input().split())), '')") is PASS
    assert run("print(3)") is FAIL
    assert run("import sys; sys.exit(3)") is FAIL
    assert run("while True: pass", **HASTY) is FAIL


def test_tests_that_assert_nothing_or_cannot_be_sent_abstain() -> None:
    """The task's fault, or ours, is not the program's; and no name of the code can bring it about."""
    code = "def add(a, b): return a + b\nclass check: pass"
    assert grade(code, "x = add(1, 2)", entry="").verdict is ABSTAIN
    assert grade(code, "assert (", entry="").verdict is ABSTAIN
    assert grade(code, "class Mine: pass\nassert add(Mine(), 2)", entry="").verdict is ABSTAIN
    assert grade(code, "import no_such_module\nassert add(1, 2) == 3", entry="").verdict is ABSTAIN
    assert grade(code, "def test_a(tmp_path):\n    assert add(1, 2) == 3", entry="").verdict is ABSTAIN
    assert grade(code, CHECK, setup="import no_such_module").verdict is ABSTAIN
    assert grade("import no_such_module\n" + code, CHECK).verdict is FAIL
    assert grade("x = 1", "from solution import add\nassert add(1, 2) == 3", entry="").verdict is FAIL
    assert grade(code, CHECK, setup="import math").verdict is PASS
    assert grade(code, CHECK).verdict is PASS
    assert told(coder(), Case(answer="x = 1")).verdict is ABSTAIN
    assert told(coder(), Case(answer="x = 1", references={"tests": "[1]"})).verdict is ABSTAIN
    assert told(coder(), Case(answer="x = 1", references={"pairs": "[1]"})).verdict is ABSTAIN


def test_slow_tests_end() -> None:
    """The time for all tests is bounded, even where a test swallows the alarm."""
    case = Case(
        artefacts={"code": "def f(): return 1"},
        references={
            "tests": "while True:\n    try:\n        f()\n    except BaseException:\n        break\nassert f() == 1"
        },
    )
    assert judged(coder(total_s=0.5), case).verdict is FAIL


def test_a_flood_is_cut() -> None:
    """A value, an output or a text that is too long fails."""
    assert grade("def add(a, b): return 'x' * (1 << 25)").verdict is FAIL
    nested = "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x"
    assert grade(nested).verdict is FAIL
    assert grade("def add(a, b):\n    x = []\n    x.append(x)\n    return x").verdict is FAIL
    assert told(coder(), Case(answer="x" * 10_000_000, references={"tests": CHECK})).verdict is FAIL


def test_the_code_is_found_in_the_answer() -> None:
    """An artefact, else the last block that defines the function, else the last block, else all of it."""
    answer = "First\n```python\ndef add(a, b): return 1\n```\nthen\n```\nprint(add(1, 2))\n```"
    assert code_of(Case(answer=answer), "add") == "def add(a, b): return 1"
    assert code_of(Case(answer=answer)) == "print(add(1, 2))"
    assert code_of(Case(answer="x = 1")) == "x = 1"
    assert code_of(Case(answer=answer, artefacts={"code": "y = 2"})) == "y = 2"
    prompt = Case(answer="    return a + b", references={"code_prompt": "def add(a, b):\n"})
    assert code_of(prompt, "add") == "def add(a, b):\n    return a + b"
    assert fenced("```\nopen") == ["open"]
    assert fenced("```" * 5) == []


def test_whose_fault_a_missing_report_is() -> None:
    """Before `started` it is ours, after it the code's; another nonce, or an unshielded sandbox, is no report."""
    case = Case(artefacts={"code": "x"}, references={"tests": CHECK}, nonce="n1")
    strict = verifier("code")
    wanted = asked(strict, case)
    assert isinstance(wanted.check, RunInSandbox)
    assert CHECK.encode() not in b"".join(wanted.check.files.values()) and CHECK not in " ".join(wanted.check.argv)

    def verdict(**fields: Any) -> VerdictKind:
        step = strict.resume(case, wanted.state, Finding(**fields))
        assert isinstance(step, Verdict)
        return step.verdict

    started = b'{"nonce": "n1", "started": true, "shielded": true}\n'
    finished = b'{"nonce": "n1", "finished": true, "n_tests": 1, "n_wrong": 0}\n'
    assert verdict(stdout=started + finished) is PASS
    assert verdict(stdout=started, killed="memory") is FAIL
    assert verdict(stdout=started + finished + finished) is FAIL
    assert verdict(stdout=finished) is ABSTAIN
    assert verdict(stdout=started + finished.replace(b"n1", b"n2")) is FAIL
    assert verdict(stdout=started.replace(b'd": true}', b'd": false}') + finished) is ABSTAIN
    assert verdict(exit_code=1) is ABSTAIN
    nameless = msgspec.structs.replace(case, nonce="")
    step = strict.resume(nameless, wanted.state, Finding(stdout=(started + finished).replace(b"n1", b"")))
    assert isinstance(step, Verdict) and step.verdict is ABSTAIN
    assert verdict(status=FindingStatus.REFUSED, reason="no sandbox") is ABSTAIN
    assert verdict(status=FindingStatus.ERROR) is ABSTAIN


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"call_s": 0.0}, "call_s is 0.0"),
        ({"memory_bytes": 5}, "memory_bytes is 5"),
        ({"pyton": []}, "no option 'pyton'"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    """Each names its key and its value."""
    with pytest.raises(ConfigError, match=says):
        verifier("code", **options)


SMALL = '["assert add(2, 3) == 5", "assert add([1], b=[2]) == [1, 2]"]'


def small_case(code: str, tests: str = SMALL) -> Case:
    """Plain assertions."""
    return Case(artefacts={"code": code}, references={"tests": tests}, nonce="n1")


def test_small_python_may_pass_but_never_fail() -> None:
    """The calls go out, what is expected stays; anything but the right values is for the sandbox to find out."""
    by, case = coder(small_python=True), small_case("def add(a, b): return a + b")
    wanted = asked(by, case)
    assert isinstance(wanted.check, RunSmallPython)
    assert "== 5" not in wanted.check.source and wanted.check.source.endswith("[add(2, 3), add([1], b=[2])]\n")
    good = by.resume(case, wanted.state, Finding(value=[5, [1, 2]]))
    assert isinstance(good, Verdict) and good.verdict is PASS
    for finding in (
        Finding(value=[5, [1, 3]]),
        Finding(value=[5]),
        Finding(value=None),
        Finding(value=[5, [1, 2]], killed="wall"),
        Finding(status=FindingStatus.REFUSED),
        Finding(status=FindingStatus.TIMEOUT),
    ):
        step = by.resume(case, wanted.state, finding)
        assert isinstance(step, Wanted) and isinstance(step.check, RunInSandbox) and not step.state.get("is_small")
        last = by.resume(case, step.state, carry_out(step.check))
        assert isinstance(last, Verdict) and last.verdict is PASS


@pytest.mark.parametrize(
    "tests",
    [
        "assert abs(add(1, 2)) == 3",
        "assert add(x, 2) == 3",
        "assert add(1, 2) == x",
        "assert add(1, 2) < 3",
        "assert add(1, 2)",
        "x = 1\nassert add(x, 2) == 3",
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        "assert m.add(1, 2) == 3",
        "assert add(1, 2) == 3 == 3",
        "assert add(*[1, 2]) == 3",
        "assert add(" + "[" * 500 + "]" * 500 + ", 2) == 3",
        "#",
    ],
)
def test_what_is_more_than_calls_and_literals_goes_to_the_sandbox(tests: str) -> None:
    """At once."""
    wanted = asked(coder(small_python=True), small_case("def add(a, b): return a + b", tests))
    assert isinstance(wanted.check, RunInSandbox)


def test_small_python_is_tried_only_where_it_is_wanted() -> None:
    """It is off unless switched on, and gets no text that UTF-8 cannot hold."""
    assert isinstance(asked(coder(small_python=True), small_case("x = '\ud800'")).check, RunInSandbox)
    assert isinstance(asked(coder(), small_case("x = 1")).check, RunInSandbox)


IMPOSTOR = """
import json, os, struct
def read(n):
    got = b''
    while len(got) < n:
        part = os.read(3, n - len(got))
        if not part: os._exit(0)
        got += part
    return got
def send(text):
    os.write(4, struct.pack('>I', len(text)) + text)
send(json.dumps({"names": ["add"], "modules": []}).encode())
read(struct.unpack('>I', read(4))[0])
send(b'{"value": {"o": {"id": 0}}}')
while True:
    read(struct.unpack('>I', read(4))[0])
    send(FRAME)
"""


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b"{}",
        b"not json",
        b"\xff\xfe",
        b'{"value": {"i": "zz"}}',
        b'{"value": {"i": 5}}',
        b'{"value": {"l": 5}}',
        b'{"value": {"d": [[1]]}}',
        b'{"value": {"d": [[{"l": []}, 1]]}}',
        b'{"value": {"r": [0, 1, 0]}}',
        b'{"value": {"D": "x"}}',
        b'{"value": {"F": ["1", "0"]}}',
        b'{"value": {"b": "x"}}',
        b'{"value": {"unknown": 1}}',
        b'{"value": {"i": "5", "f": "0"}}',
        b'{"value": 5}',
        b'{"value": {"o": 5}}',
        b'{"value": {"o": {"id": "x"}}}',
        b'{"value": {"o": {"callback": 0}}}',
        b'{"raised": 5}',
        b'{"raised": []}',
        b'{"raised": ["SystemExit", "BaseException"]}',
        b'{"raised": ["KeyboardInterrupt"]}',
        b'{"raised": ["Expired"], "why": {}}',
        b'{"raised": ["UnicodeDecodeError"]}',
        b'{"callback": 99, "args": {"l": []}}',
        b'{"callback": "x"}',
        b'{"callback": {}}',
        b'{"unsupported": "x", "value": 5}',
        b"[" * 100_000,
        b'{"value": ' + b'{"l":[' * 20_000 + b"]}" * 20_000 + b"}",
    ],
)
def test_an_impostor_of_the_candidates_process_convinces_nobody(frame: bytes) -> None:
    """Code that speaks our own protocol can say values, and a wrong or unreadable value fails."""
    code = IMPOSTOR.replace("FRAME", repr(frame))
    found = graded_within(HASTY, code, "def check(candidate):\n    assert candidate(2, 3) == 5")
    assert found.verdict is FAIL, found.explanation


def test_the_impostor_is_heard() -> None:
    """Otherwise the frames above would prove nothing: the right value, said by it, passes."""
    code = IMPOSTOR.replace("FRAME", repr(b'{"value": {"i": "5"}}'))
    assert grade(code, "def check(candidate):\n    assert candidate(2, 3) == 5").verdict is PASS
