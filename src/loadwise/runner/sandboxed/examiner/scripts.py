"""Candidates that are whole programs: run once for each pair of input and expected output."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

from .pipe import FRAME_MAX_BYTES, WHY_MAX_CHARACTERS


def run_scripts(paper: dict[str, Any], results: list[list[str]]) -> None:
    """Run the candidate as a program, once for each pair of input and expected output."""
    path = os.path.join(os.getcwd(), "solution.py")
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(paper["code"])
    for number, pair in enumerate(paper["pairs"], 1):
        results.append([f"pair {number}", run_script(path, pair, paper["call_s"])[:WHY_MAX_CHARACTERS]])


def run_script(path: str, pair: dict[str, str], call_s: float) -> str:
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
                process.communicate(pair["input"].encode("utf-8", "surrogatepass"), timeout=call_s)
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


def lines_of(text: str) -> list[str]:
    """Lines without the blanks at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
