"""The demo's stream of problems: the project's own, generated, with answers computed by code."""

from __future__ import annotations

from collections.abc import Callable

from loadwise.demo.luck import Luck
from loadwise.demo.problems import arithmetic, dates, strings, units
from loadwise.demo.task import FAMILIES, LEVELS, Family, Kind, Problem, Task
from loadwise.kernel.errors import ConfigError

TASKS_MAX = 10_000
"""Largest stream; bounds the search for prompts that were not used yet."""
_REDRAWS_MAX = 1_000

GENERATORS: dict[Family, tuple[Callable[[Luck], Problem], ...]] = {
    "arithmetic": arithmetic.PROBLEMS,
    "dates": dates.PROBLEMS,
    "strings": strings.PROBLEMS,
    "units": units.PROBLEMS,
}

_HINT: dict[Kind, str] = {
    "number": "a plain number",
    "date": "a date as YYYY-MM-DD",
    "text": "the result only",
}


def generate_tasks(n: int, seed: int, levels: int = LEVELS) -> tuple[Task, ...]:
    """Generate the first `n` problems of the stream named by `seed`.

    Families and difficulties are balanced: every run of 4 * levels tasks holds each (family, difficulty) once, in
    random order. A shorter stream is a prefix of a longer one. Prompts are unique within the stream.

    Args:
        n: 1..TASKS_MAX.
        seed: any integer.
        levels: hardest difficulty, 1..LEVELS: the smallest real models solve hardly anything above the first.

    Raises:
        ConfigError: `n` or `levels` out of range.
    """
    if not 1 <= n <= TASKS_MAX:
        raise ConfigError(f"number of tasks is {n}: it must lie between 1 and {TASKS_MAX}")
    if not 1 <= levels <= LEVELS:
        raise ConfigError(f"hardest difficulty is {levels}: it must lie between 1 and {LEVELS}")
    tasks: list[Task] = []
    seen: set[str] = set()
    cells = [(family, level) for family in FAMILIES for level in range(1, levels + 1)]
    for start in range(0, n, len(cells)):
        for offset, (family, level) in enumerate(Luck(seed, "order", start).shuffled(cells)):
            if start + offset < n:
                task = _fresh(seed, start + offset, family, level, seen)
                seen.add(task.prompt)
                tasks.append(task)
    return tuple(tasks)


def _fresh(seed: int, place: int, family: Family, level: int, seen: set[str]) -> Task:
    for redraw in range(_REDRAWS_MAX):
        luck = Luck(seed, "problem", place, redraw)
        problem = GENERATORS[family][level - 1](luck)
        # Half of the problems that a calculator helps with are given to an agent that has one.
        uses_tool = len(problem.steps) > 0 and level > 1 and luck.unit() < 0.5
        task = _placed(problem, f"{family}-{level}-{place:05d}", family, level, uses_tool)
        if task.prompt not in seen:
            return task
    raise AssertionError(f"no unused {family} problem of difficulty {level} in {_REDRAWS_MAX} draws (task {place})")


def asked(statement: str, kind: Kind, units: tuple[str, ...] = ()) -> str:
    """Put a statement as a question that says how its answer is to be written."""
    hint = _HINT[kind] + (f" in {units[0]}" if units else "")
    return f'{statement} Finish with a line "Answer: <value>", where <value> is {hint}.'


def _placed(problem: Problem, task_id: str, family: Family, level: int, uses_tool: bool) -> Task:
    tool = " Use the calculator tool for the arithmetic." if uses_tool else ""
    return Task(
        task_id=task_id,
        family=family,
        difficulty=level,
        prompt=asked(problem.statement + tool, problem.kind, problem.units),
        answer=problem.answer,
        kind=problem.kind,
        tolerance=problem.tolerance,
        units=problem.units,
        uses_tool=uses_tool,
        steps=problem.steps if uses_tool else (),
    )
