"""Find the final answer in a model's text, in time linear in what is read, whatever the text holds.

Only the last `TAIL_CHARACTERS` are read: the answer stands at the end. Where a text says several answers, the last one
said in the strongest form counts: `\\boxed{…}`, then a line `#### …`, then `Answer: …` or `the answer is …`. A text
that hedges inside that one place ("A or B") is for each verifier to refuse.
"""

import re
import unicodedata
from typing import NamedTuple

TAIL_CHARACTERS = 20_000
VALUE_MAX_CHARACTERS = 2_000
"""Of one answer in a line or a box; a longer one is no answer."""

REFERENCE_NAMES = ("reference", "reference_answer", "expected", "gold", "answer")
"""By which a reference answer may be given, first match."""

_MARKER = re.compile(r"\b(?:answer|choice)\b[\s*_`]{0,8}(?:[:=：]|\bis\b[\s*_`]{0,8}:?)", re.IGNORECASE)
_HASHES = re.compile(r"####")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|[*_`$\"“”{}]+|\\[()\[\]]")


class Found(NamedTuple):
    """A final answer, and by which form it was found."""

    value: str
    form: str
    """`boxed`, `hashes`, `marker`, or `last_line`."""


def tail(text: str, limit: int = TAIL_CHARACTERS) -> str:
    """The end of a text."""
    return text[-limit:]


def final_answer(text: str) -> Found | None:
    """What a text gives as its final answer; None where it says nothing.

    >>> final_answer("so x = 3.\\n**Answer:** 4 cm.").value
    '4 cm.'
    >>> final_answer("first \\\\boxed{3}, no: \\\\boxed{\\\\frac{1}{2}}").value
    '\\\\frac{1}{2}'
    """
    end = tail(text)
    boxes = boxed(end)
    if boxes:
        return Found(boxes[-1], "boxed")
    for pattern, form in ((_HASHES, "hashes"), (_MARKER, "marker")):
        last = None
        for match in pattern.finditer(end):
            last = match
        if last is not None:
            value = _first_line(end[last.end() :])
            if value:
                return Found(value, form)
    for line in reversed(end.splitlines()):
        value = line[:VALUE_MAX_CHARACTERS].strip()
        if value:
            return Found(value, "last_line")
    return None


def boxed(text: str) -> list[str]:
    """The contents of all closed `\\boxed{…}` and `\\fbox{…}`, by where they end, nested ones before their outer one.

    One pass with a stack: unclosed boxes by the thousand cost no more than other text.

    >>> boxed("\\\\boxed{a{b}} \\\\boxed{c")
    ['a{b}']
    """
    found: list[str] = []
    starts: list[int] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and text.startswith((r"\boxed", r"\fbox"), at):
            at += 6 if text[at + 1] == "b" else 5
            after = at
            while after < len(text) and text[after] == " ":
                after += 1
            if after < len(text) and text[after] == "{":
                starts.append(after + 1)
                at = after + 1
            continue
        if char == "\\":
            at += 2
            continue
        if char == "{":
            starts.append(-1)
        elif char == "}" and starts:
            start = starts.pop()
            if start >= 0 and at - start <= VALUE_MAX_CHARACTERS:
                found.append(text[start:at].strip())
        at += 1
    return [value for value in found if value]


def without_markup(value: str) -> str:
    """Drop Markdown and LaTeX dress, but not between two digits: 2*88 must not become 288."""
    return _MARKUP.sub(_undressed, value).strip()


def ascii_digits(text: str) -> str:
    """Decimal digits of any script as 0 to 9. Superscripts are left alone: 5² is not 52."""
    if text.isascii():
        return text
    return "".join(_plain(char) for char in text)


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs replaced: checks and states are written as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def folded(text: str, *, case_sensitive: bool = False, punctuation: bool = False) -> str:
    """A text as it is compared: composed, blanks collapsed, dress and case dropped unless they are to count."""
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    if not punctuation:
        plain = without_markup(plain).strip(" \t'.,;:!?‘’«»()[]")
        plain = " ".join(plain.split())
    return plain if case_sensitive else plain.casefold()


def _plain(char: str) -> str:
    if char in "−–":
        return "-"
    digit = unicodedata.decimal(char, None)
    return char if digit is None else str(digit)


def _undressed(match: re.Match[str]) -> str:
    start, end = match.span()
    before, after = match.string[max(start - 1, 0) : start], match.string[end : end + 1]
    return match[0] if before.isdigit() and after.isdigit() else ""


def _first_line(text: str) -> str:
    """The first line that says something: models like to break the line after `Answer:`."""
    for line in text.splitlines():
        value = line[:VALUE_MAX_CHARACTERS].strip().strip("*_`").strip()
        if value:
            return value
    return ""
