"""The stream of problems: every answer is worked out again from the prompt's words by other means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.demo.calculator import evaluate
from loadwise.demo.task import FAMILIES, LEVELS, Task
from loadwise.demo.tasks import TASKS_MAX, generate_tasks
from loadwise.kernel.errors import ConfigError

STREAM = generate_tasks(2_000, 11)
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = "January February March April May June July August September October November December"


def figures(task: Task) -> list[Decimal]:
    """Every number of a prompt in order."""
    return [Decimal(text) for text in re.findall(r"-?\d+(?:\.\d+)?", statement(task))]


def statement(task: Task) -> str:
    return task.prompt.split(" Finish with a line")[0].split(" Use the calculator")[0]


def days(task: Task) -> list[int]:
    """Every date of a prompt as a day number, counted from the civil calendar and not by `datetime`."""
    found = re.findall(r"(\d{4})-(\d{2})-(\d{2})", statement(task))
    return [julian_day(int(y), int(m), int(d)) for y, m, d in found]


def julian_day(year: int, month: int, day: int) -> int:
    """The Julian day number by Fliegel and van Flandern's integer formula (1968)."""
    shift = (14 - month) // 12
    y, m = year + 4800 - shift, month + 12 * shift - 3
    return day + (153 * m + 2) // 5 + 365 * y + y // 4 - y // 100 + y // 400 - 32045


def arithmetic(task: Task) -> Decimal:
    """Work arithmetic out in decimals."""
    f = figures(task)
    match task.difficulty:
        case 1:
            return sum(f, Decimal(0))
        case 2:
            return f[0] * f[1] + f[2]
        case 3:
            a, b, c, d = (Decimal(text) for text in re.findall(r"\d+", statement(task)))
            return a * c + b * c - d
        case 4:
            boxes, each, price, percent, fee = f
            goods = boxes * each * price
            return goods - goods * percent / 100 + fee
        case _:
            a, two, b, c, d, e = (Decimal(text) for text in re.findall(r"\d+", statement(task)))
            return (c * a**two - c * b + d) / e


def unit(task: Task) -> Decimal:
    """Work conversions out in decimals of 28 digits, in another order than the generator."""
    f, text = figures(task), statement(task)
    match task.difficulty:
        case 1:
            return f[0].scaleb(2 if "centimetres" in text else 3)
        case 2:
            return f[0] * Decimal("2.54" if "inches" in text else "1.609")
        case 3:
            return f[0] * Decimal("1.8") + 32 if "to degrees F" in text else (f[0] - 32) / Decimal("1.8")
        case 4:
            return f[0] / Decimal("3.6") if "train" in text else f[0] * Decimal("0.06")
        case _:
            miles, per_100, hundred, price = f[:4]
            assert hundred == 100
            return price * (per_100 / 100) * miles / Decimal("3.785") * Decimal("1.609")


def string(task: Task) -> str:
    """Work strings out letter by letter."""
    text = statement(task)
    quoted = re.findall(r'"([^"]*)"', text)
    match task.difficulty:
        case 1:
            return (list(quoted[0]) if "first" in text else list(reversed(quoted[0])))[0]
        case 2:
            return "".join(reversed(quoted[0]))
        case 3:
            return str(Counter(quoted[1])[quoted[0]])
        case 4:
            alphabet = "abcdefghijklmnopqrstuvwxyz"
            k = int(re.findall(r"(\d+) places", text)[0])
            return quoted[0].translate(str.maketrans(alphabet, alphabet[k:] + alphabet[:k]))
        case _:
            words = text.removeprefix("Take the words ").split(".")[0].split(", ")
            return "-".join(sorted(re.sub("[aeiou]", "", word[::-1]) for word in words))


def calendar(task: Task) -> str:
    """Work dates out on Julian day numbers, whose remainder by 7 is 0 on Mondays."""
    text, day = statement(task), days(task)
    match task.difficulty:
        case 1 | 2:
            n = 1 if task.difficulty == 1 else int(re.findall(r"is (\d+) days", text)[0])
            return iso(day[0] - n if " before " in text else day[0] + n)
        case 3:
            return str(day[1] - day[0])
        case 4:
            assert WEEKDAYS[day[0] % 7] in text
            return WEEKDAYS[day[1] % 7]
        case _:
            return business_day(text)


def business_day(text: str) -> str:
    """Find the n-th weekday by walking the month, then jump by whole weeks and walk the rest."""
    found = re.match(r"Take the (\w+) (\w+) of (\w+) (\d+)\. Which date is (\d+) business", text)
    assert found is not None
    place = ["first", "second", "third", "fourth"].index(found[1])
    first = julian_day(int(found[4]), 1 + MONTHS.split().index(found[3]), 1)
    matching = [d for d in range(first, first + 31) if WEEKDAYS[d % 7] == found[2]]
    day, weekday = matching[place], matching[place] % 7
    n = int(found[5])
    if weekday > 4:  # from a weekend, counting starts at the Friday before
        day, weekday = day - (weekday - 4), 4
    day += 7 * (n // 5)
    rest = n % 5
    return iso(day + rest + (2 if weekday + rest > 4 else 0))


def iso(day: int) -> str:
    """Write a Julian day number as a date, through the calendar's epoch."""
    return (date(2000, 1, 1) + timedelta(days=day - julian_day(2000, 1, 1))).isoformat()


@pytest.mark.parametrize(("family", "solve"), [("arithmetic", arithmetic), ("units", unit)])
def test_numbers_agree_with_decimals(family: str, solve: Callable[[Task], Decimal]) -> None:
    """Every number answered equals one computed in decimals, to ten places."""
    tasks = [task for task in STREAM if task.family == family]
    assert {task.difficulty for task in tasks} == set(range(1, LEVELS + 1))
    with localcontext(prec=40):
        for task in tasks:
            assert abs(solve(task) - Decimal(task.answer)) <= Decimal("1e-10"), task


@pytest.mark.parametrize(("family", "solve"), [("strings", string), ("dates", calendar)])
def test_words_and_dates_agree_with_another_way(family: str, solve: Callable[[Task], str]) -> None:
    """Every string and date answered equals one worked out by another method."""
    for task in STREAM:
        if task.family == family:
            assert solve(task) == task.answer, task


def test_the_calculator_leads_to_the_answer() -> None:
    """The last step of a tool task yields the answer, and only tool tasks carry steps."""
    with_tool = [task for task in STREAM if task.uses_tool]
    assert 100 < len(with_tool) < 1_000
    for task in STREAM:
        assert task.uses_tool == bool(task.steps) == ("calculator" in task.prompt)
        if task.steps:
            assert abs(evaluate(task.steps[-1]) - Fraction(task.answer)) <= Fraction(1, 10**10)


@given(st.integers(1, 60), st.integers(0, 60), st.integers())
def test_a_shorter_stream_is_a_prefix(n: int, more: int, seed: int) -> None:
    """Any seed works, the same seed gives the same stream, and more tasks only append."""
    assert generate_tasks(n, seed) == generate_tasks(n + more, seed)[:n]


@given(st.integers())
def test_every_block_of_twenty_is_balanced(seed: int) -> None:
    """Each family and difficulty occurs once in every 20 tasks; ids and prompts are unique."""
    tasks = generate_tasks(40, seed)
    for block in (tasks[:20], tasks[20:]):
        assert len({(task.family, task.difficulty) for task in block}) == len(FAMILIES) * LEVELS
    assert len({task.task_id for task in tasks}) == len({task.prompt for task in tasks}) == 40


def test_seeds_differ_and_prompts_say_how_to_answer() -> None:
    """Another seed gives another stream; every prompt asks for the answer line and hides the answer's level."""
    assert generate_tasks(20, 1) != generate_tasks(20, 2)
    for task in STREAM[:200]:
        assert 'Finish with a line "Answer: <value>"' in task.prompt
        assert task.task_id not in task.prompt


def test_the_largest_stream_has_unique_prompts() -> None:
    """The spaces of problems are large enough for TASKS_MAX without a repeated prompt."""
    tasks = generate_tasks(TASKS_MAX, 0)
    assert len({task.prompt for task in tasks}) == TASKS_MAX


@pytest.mark.parametrize("n", [0, -1, TASKS_MAX + 1])
def test_a_number_out_of_range_is_refused(n: int) -> None:
    """The message names the value and the limit."""
    with pytest.raises(ConfigError, match=rf"{n}: it must lie between 1 and {TASKS_MAX}"):
        generate_tasks(n, 0)


def test_the_hardest_difficulty_can_be_lowered() -> None:
    """A stream of easy problems is balanced over its own cells, uniform in ids, and bounded."""
    assert {(t.family, t.difficulty) for t in generate_tasks(4, 5, levels=1)} == {(f, 1) for f in FAMILIES}
    assert max(t.difficulty for t in generate_tasks(50, 5, levels=3)) == 3
    for levels in (0, LEVELS + 1):
        with pytest.raises(ConfigError, match=f"{levels}: it must lie between 1 and {LEVELS}"):
            generate_tasks(4, 0, levels)


def test_the_largest_stream_of_one_difficulty_fits_too() -> None:
    """Even with one level the spaces hold a quarter of TASKS_MAX unique problems per family."""
    tasks = generate_tasks(TASKS_MAX, 1, levels=1)
    assert len({task.prompt for task in tasks}) == TASKS_MAX
