"""Read the answer out of a model's text and compare it with the known one.

The text is hostile until proven otherwise: it may hold every weekday, a thousand numbers, or a number that
only looks right. So the last `Answer:` decides, its line must hold exactly one value, and whatever cannot be
read fails.
"""

from __future__ import annotations

import re
from datetime import date
from fractions import Fraction
from typing import Literal, TypeAlias

from loadwise.demo.task import Task
from loadwise.kernel.fact import Fact

TEXT_TAIL_CHARACTERS = 20_000
"""Only the end of a longer text is read: the answer stands there, and the work stays bounded."""
_LINE_MAX_CHARACTERS = 200

Outcome: TypeAlias = Literal["pass", "fail"]


class Grade(Fact, frozen=True, kw_only=True):
    """What a text is worth, and why."""

    verdict: Outcome
    explanation: str


_ANSWER = re.compile(r"\banswer\b[\s*_`]*[:=]", re.IGNORECASE)
_MARKUP = re.compile(r"(?:\\boxed|\\text|\\[()\[\]]|[*_`$\"“”{}<>])+")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})?(?:\.(?P<part>[0-9]{1,30}))?"
    r"(?:/(?P<under>[0-9]{1,30}))?"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def grade(task: Task, text: str) -> Grade:
    """Compare the last `Answer:` line of `text` with the task's answer.

    Numbers may carry thousands commas, a currency sign, one of the task's units, or an equation before them;
    dates must be ISO; other text is compared without regard to case, space and the punctuation around it.
    """
    value = answer_line(text)
    if value is None:
        return _fail("no line of the form 'Answer: <value>'")
    compare = {"number": _compare_number, "date": _compare_date, "text": _compare_text}[task.kind]
    return compare(task, value)


def answer_line(text: str) -> str | None:
    """Return what follows the last `Answer:`, without markup; None where there is none.

    A value may stand on the next line that is not blank, as models like to write it.

    >>> answer_line("so it is 4.\\n**Answer:** 4 cm.")
    '4 cm'
    """
    tail = text[-TEXT_TAIL_CHARACTERS:]
    last = None
    for match in _ANSWER.finditer(tail):
        last = match
    if last is None:
        return None
    for line in tail[last.end() :].splitlines():
        value = _MARKUP.sub(_unmarked, line[:_LINE_MAX_CHARACTERS]).strip().rstrip(".!").strip()
        if value:
            return value
    return None


def _unmarked(match: re.Match[str]) -> str:
    """Drop markup, but not between two digits: 2*88 must not become 288."""
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return match[0] if before.isdigit() and after.isdigit() else ""


def _fail(why: str) -> Grade:
    return Grade(verdict="fail", explanation=why)


def _verdict(right: bool, found: str, wanted: str) -> Grade:
    verdict: Outcome = "pass" if right else "fail"
    return Grade(verdict=verdict, explanation=f"found {found[:80]}, expected {wanted}")


def _compare_number(task: Task, value: str) -> Grade:
    plain = value.replace("−", "-").rsplit("=", 1)[-1].strip().lstrip("≈~").lstrip("€£").strip()
    match = _NUMBER.match(plain)
    if match is None or not (match["whole"] or match["part"]):
        return _fail(f"{value[:80]!r} does not begin with a number")
    rest = " ".join(plain[match.end() :].split()).lower()
    if rest and rest not in task.units:
        allowed = ", ".join(task.units) or "none"
        return _fail(f"{rest[:40]!r} follows the number; accepted units: {allowed}")
    number = Fraction(f"{(match['whole'] or '0').replace(',', '')}.{match['part'] or '0'}")
    if match["under"]:
        if int(match["under"]) == 0:
            return _fail(f"{value[:80]!r} divides by zero")
        number /= int(match["under"])
    number = -number if match["sign"] == "-" else number
    right = abs(number - Fraction(task.answer)) <= Fraction(str(task.tolerance))
    return _verdict(right, plain, task.answer)


def _compare_date(task: Task, value: str) -> Grade:
    if not _DATE.fullmatch(value):
        return _fail(f"{value[:80]!r} is not a date written YYYY-MM-DD")
    try:
        found = date.fromisoformat(value)
    except ValueError:
        return _fail(f"{value!r} is not a day of the calendar")
    return _verdict(found == date.fromisoformat(task.answer), value, task.answer)


def _compare_text(task: Task, value: str) -> Grade:
    found, wanted = _folded(value), _folded(task.answer)
    return _verdict(found == wanted, repr(found), repr(wanted))


def _folded(text: str) -> str:
    return "".join(text.split()).strip("'.,;:!").casefold()
