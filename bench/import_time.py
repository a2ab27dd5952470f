"""How long `import loadwise` takes, and that it loads neither torch, numba nor a web library.

python -m bench.import_time --json [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from bench import result
from bench.figures import check

HEAVY = (
    "aiohttp",
    "fastapi",
    "httptools",
    "httpx",
    "numba",
    "openai",
    "starlette",
    "torch",
    "uvicorn",
    "uvloop",
)
"""Packages that a program pays for only when it serves, trains or calls."""
IMPORT_MAX_S = 0.5

IMPORT = "import loadwise"
OPEN = "import loadwise; loadwise.open_stack"
"""The package loads its names when they are first used, so what a user waits for is measured besides."""

# the clock starts inside the child, so that the start of Python itself is not counted
_CHILD = """
import json, sys, time
began_at_s = time.perf_counter()
{statement}
took_s = time.perf_counter() - began_at_s
print(json.dumps([took_s, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def time_once(statement: str) -> tuple[float, list[str]]:
    """Run a statement in a Python of its own.

    Returns:
        Seconds taken, and the top-level names of all modules that were then loaded.
    """
    child = [sys.executable, "-c", _CHILD.format(statement=statement)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=60, check=True)
    took_s, loaded = json.loads(done.stdout.splitlines()[-1])
    return took_s, loaded


def heavy(loaded: list[str]) -> list[str]:
    """Return which of the packages that must stay out are in."""
    return sorted(set(loaded) & set(HEAVY))


def main(argv: list[str] | None = None) -> int:
    """Measure; return 0 if it ran."""
    parser = argparse.ArgumentParser(prog="bench.import_time", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="the same: five imports take seconds")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(argv)
    times_s: dict[str, list[float]] = {}
    found: set[str] = set()
    for key, statement in (("import_s", IMPORT), ("open_stack_s", OPEN)):
        time_once(statement)  # leaves compiled files and a warm cache, as after an installation
        runs = [time_once(statement) for _ in range(options.runs)]
        times_s[key] = [took_s for took_s, _ in runs]
        found.update(heavy(runs[-1][1]))
    medians = {key: statistics.median(times) for key, times in times_s.items()}
    report = result.build(
        "import_time",
        config={"runs": options.runs, "load_average": round(os.getloadavg()[0], 2), "heavy_loaded": sorted(found)},
        values={**medians, "heavy_modules": float(len(found))},
        ci95={key: [min(times), max(times)] for key, times in times_s.items()},
        checks=[
            check("import_s", "<=", IMPORT_MAX_S, medians["import_s"]),
            check("heavy_modules", "==", 0.0, len(found)),
        ],
    )
    result.show(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
