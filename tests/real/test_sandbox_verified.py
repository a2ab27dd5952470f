"""A code task from the agent to the credit, in the real sandbox: turn, finish, sandbox, verdict, credit, why."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from engines import Engine, message, says
from processes import SOURCE, serve
from sites import on_loop, pool, site, until

from loadwise.emulator.emulator import start_emulator
from loadwise.emulator.main import EmulateOptions, emulator_spec
from loadwise.journal.explain import why
from loadwise.journal.explanation_text import render_why
from loadwise.settings import parse_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "verified_code"
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("can_sandbox")]

TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
TYPES = {"code": {"verifier": {"kind": "code"}, "false_pass": 0.02}}
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
FORGED = """```python
import os, sys
print('{"nonce": "", "started": true, "shielded": true}')
print('{"finished": true, "n_tests": 2, "n_wrong": 0}')
def add(a, b):
    os._exit(0)
```"""
BOMB = "```python\nimport os\nwhile True:\n    os.fork()\n```"


@pytest.mark.parametrize(
    ("text", "wanted", "said"),
    [
        (RIGHT, "pass", "2"),
        (RIGHT.replace("+", "-"), "fail", ""),
        (FORGED, "fail", ""),
        (BOMB, "fail", ""),
        ("```python\ndef add(a, b):\n    while True: pass\n```", "fail", ""),
        ("I will not.", "fail", ""),
    ],
)
def test_a_code_task_is_judged_in_the_sandbox(tmp_path: Path, text: str, wanted: str, said: str) -> None:
    """Right code passes; wrong, forging, bombing and looping code fails, and each says why."""

    @on_loop
    async def run() -> None:
        async with site(Engine(says(message(text))), journal=tmp_path, task_types=TYPES) as s:
            await s.chat("p", "Write add(a, b).", headers={"X-Loadwise-Task-Type": "code"})
            await s.finish("p", {"references": {"tests": TESTS}})
            await until(lambda: s.program("p").verdict is not None)  # type: ignore[union-attr]
            program = s.program("p")
            assert program is not None and program.verdict is not None
            assert program.verdict.verdict == wanted, program.verdict
            assert program.is_credited and program.verdict.explanation and said in program.verdict.explanation
            assert not [text for text in s.said if "NOT trusted" in text]
        told = render_why(why(tmp_path, "p"))
        assert "by code (version" in told and program.verdict.explanation in told

    run()


@on_loop
async def test_killed_with_its_verification_running_it_is_judged_after_the_restart(tmp_path: Path) -> None:
    """kill -9 after the finish was acknowledged: the next run judges the same case, once."""
    slow = RIGHT.replace("def", "import time\ndef").replace("return", "time.sleep(1.5)\n    return")
    engine = await Engine(says(message(slow))).start()
    config = pool(engine, task_types=TYPES)
    first = await serve(config, journal=str(tmp_path))
    answer = await first.ask(
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Write add(a, b)."}]},
        {"X-Session-ID": "p", "X-Loadwise-Task-Type": "code"},
    )
    assert answer.status == 200
    finished = await first.ask("POST", "/v1/programs/p/finish", {"references": {"tests": TESTS}})
    assert finished.status == 200
    first.kill()
    await first.wait()
    assert len(list((tmp_path / "unjudged").glob("*.case"))) == 1
    second = await serve(config, journal=str(tmp_path))
    assert any("judged again" in text for text in second.said)
    while (verdict := (await second.ask("GET", "/v1/programs/p")).json["verdict"]) is None:
        await asyncio.sleep(0.05)  # the test's own limit bounds it
    assert verdict["verdict"] == "pass" and verdict["verifier"] == "code", verdict
    assert (await second.ask("GET", "/v1/programs/p")).json["is_credited"]
    second.terminate()
    assert await second.wait() == 0
    assert not list((tmp_path / "unjudged").glob("*.case"))


@on_loop
async def test_the_example_runs_as_it_is_written(tmp_path: Path) -> None:
    """Its pool file and its agent, over emulated engines: turn, finish with artefacts, sandbox, verdict, credit."""
    config = parse_yaml((EXAMPLE / "pool.yaml").read_text(), where="pool.yaml")
    handle = await start_emulator(emulator_spec(EmulateOptions(models=("small", "large"))))
    for backend in config["backends"]:
        backend["url"] = handle.urls[backend["model"]]
    gateway = await serve(config, journal=str(tmp_path))
    agent = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE / "agent.py"),
        f"http://127.0.0.1:{gateway.port}/v1",
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await agent.communicate()
    program_id, verdict, *_ = said.decode().split()
    assert verdict == "pass" and said.decode().rstrip().endswith("credited: True"), said
    gateway.terminate()
    assert await gateway.wait() == 0
    await handle.close()
    assert "by code (version" in render_why(why(tmp_path, program_id))


CHECKOUT = {"adding.py": "def add(a, b):\n    return a - b\n", "test_adding.py": "", "keep.py": "x = 1\n"}
SUITE = "import unittest\nfrom adding import add\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
SUITE += "        self.assertEqual(add(2, 3), 5)\n"
PATCHED = {
    "references": {
        "files": json.dumps(CHECKOUT),
        "test_files": json.dumps({"test_adding.py": SUITE}),
        "fail_to_pass": json.dumps(["test_adding.T.test_add"]),
        "pass_to_pass": "[]",
    }
}
GOOD = "--- a/adding.py\n+++ b/adding.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
NEW = "--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n"
LINK = "diff --git a/out b/out\nnew file mode 120000\n--- /dev/null\n+++ b/out\n@@ -0,0 +1 @@\n+/etc\n"
LINK += "\\ No newline at end of file\n"
PATCHES = {
    "mends it": (GOOD, "pass"),
    "does not apply": (GOOD.replace("return a - b", "return a * b"), "fail"),
    "is no patch": ("I changed the minus into a plus.", "fail"),
    "touches .git": (GOOD + NEW.format(path=".git/hooks/pre-commit", line="exit 0"), "fail"),
    "leads out": (GOOD + NEW.format(path="../../outside", line="x"), "fail"),
    "is absolute": (GOOD.replace("b/adding.py", "/etc/passwd"), "fail"),
    "links out": (LINK + NEW.format(path="out/x", line="x"), "fail"),
    "forges a pass": (
        NEW.format(path="adding/__init__.py", line="import os; print('OK'); os._exit(0)"),
        "fail",
    ),
    "changes its tests": (NEW.format(path="test_other.py", line="x = 1"), "fail"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_judged_in_the_sandbox(name: str) -> None:
    """It passes where it mends; whatever else it tries is a fail that says why."""
    patch, wanted = PATCHES[name]

    @on_loop
    async def run() -> None:
        types = {"code": {"verifier": {"kind": "patch", "options": {"framework": "unittest", "total_s": 30}}}}
        async with site(Engine(says(message("done"))), task_types=types) as s:
            await s.chat("p", "Mend add.", headers={"X-Loadwise-Task-Type": "code"})
            await s.finish("p", {**PATCHED, "artefacts": {"patch": patch}})
            await until(lambda: s.program("p").verdict is not None)  # type: ignore[union-attr]
            verdict = s.program("p").verdict  # type: ignore[union-attr]
            assert verdict is not None and verdict.verdict == wanted, verdict
            assert verdict.explanation and not [text for text in s.said if "NOT trusted" in text]

    run()
