"""Dates of the Gregorian calendar: steps, spans, weekdays, business days and months."""

from __future__ import annotations

import calendar
from collections.abc import Callable
from datetime import date, timedelta

from loadwise.demo.luck import Luck
from loadwise.demo.task import Problem

_FIRST = date(1970, 1, 1).toordinal()
_LAST = date(2049, 12, 31).toordinal()
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PLACES = ("first", "second", "third", "fourth")
_MONTHS = (  # calendar.month_name would follow the locale
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def _day(luck: Luck) -> date:
    return date.fromordinal(luck.integer(_FIRST, _LAST))


def _date(statement: str, answer: date) -> Problem:
    return Problem(statement=statement, answer=answer.isoformat(), kind="date")


def next_day(luck: Luck) -> Problem:
    """Level 1: the day after or before, in the same month."""
    start = _day(luck).replace(day=luck.integer(2, 27))
    side, sign = luck.pick((("after", 1), ("before", -1)))
    return _date(f"Which date is one day {side} {start}?", start + timedelta(days=sign))


def across_months(luck: Luck) -> Problem:
    """Level 2: some weeks later or earlier."""
    start, n = _day(luck), luck.integer(25, 95)
    side, sign = luck.pick((("after", 1), ("before", -1)))
    return _date(f"Which date is {n} days {side} {start}?", start + timedelta(days=sign * n))


def span(luck: Luck) -> Problem:
    """Level 3: days between two dates."""
    start = _day(luck)
    end = start + timedelta(days=luck.integer(40, 700))
    return Problem(
        statement=f"How many days is it from {start} to {end}? Do not count the first day.",
        answer=str((end - start).days),
        kind="number",
        units=("days", "day"),
    )


def weekday(luck: Luck) -> Problem:
    """Level 4: the weekday of a date, from another date's weekday."""
    known = _day(luck)
    asked = known + timedelta(days=luck.integer(60, 900))
    return Problem(
        statement=f"{known} is a {_WEEKDAYS[known.weekday()]}. Which day of the week is {asked}?",
        answer=_WEEKDAYS[asked.weekday()],
        kind="text",
    )


def nth_weekday(luck: Luck) -> Problem:
    """Level 5: so many business days after the n-th weekday of a month."""
    month_of = _day(luck)
    place, wanted, n = luck.integer(0, 3), luck.integer(0, 6), luck.integer(4, 30)
    first, _ = calendar.monthrange(month_of.year, month_of.month)
    start = month_of.replace(day=1 + (wanted - first) % 7 + 7 * place)
    end, left = start, n
    while left:
        end += timedelta(days=1)
        left -= end.weekday() < 5
    return _date(
        f"Take the {_PLACES[place]} {_WEEKDAYS[wanted]} of {_MONTHS[month_of.month - 1]} {month_of.year}. "
        f"Which date is {n} business days later? Business days are Monday to Friday; ignore holidays and do "
        "not count the first day.",
        end,
    )


PROBLEMS: tuple[Callable[[Luck], Problem], ...] = (next_day, across_months, span, weekday, nth_weekday)
