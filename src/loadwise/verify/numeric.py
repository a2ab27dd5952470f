"""A number with a tolerance, compared exactly: no float stands between the text and the verdict."""

import re
from fractions import Fraction
from typing import Literal

from loadwise.kernel.fact import Fact

from .case import Case
from .check import Finding
from .options import read_options, require_range
from .reading import REFERENCE_NAMES, Found, ascii_digits, final_answer, tail, without_markup
from .spec import VerifierSpec
from .verifier import State, Step, abstained, failed, passed, shown

DIGITS_MAX = 100
EXPONENT_MAX = 400
"""A number beyond them is read as no number: nobody may make us compute 10**999999."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,100}(?![0-9]))"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s?[$€£¥]?\s?(?:(?P<whole>{_DIGITS})(?:\.(?P<part>[0-9]{{0,100}})(?![0-9]))?"
    r"|\.(?P<bare>[0-9]{1,100})(?![0-9]))"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,9})(?![0-9A-Za-z.])"
    r"|\s?(?:[x×*]|\\times|\\cdot)\s?10\s?\^\s?\{?(?P<power>[-+]?[0-9]{1,9})\}?)?"
    r"(?:\s?/\s?(?P<under>[0-9]{1,100})(?![0-9.]))?"
    r"\s?(?P<percent>\\?%)?(?:\s?(?P<scale>thousand|million|billion|trillion)\b)?"
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?([-+]?[0-9]{1,100})\s?\}\s?\{\s?([-+]?[0-9]{1,100})\s?\}")
_LATEX_COMMA = re.compile(r"\{,\}|\\,|\\!|\u202f|\u00a0")
_AFTER_BAD = re.compile(r"^\s?(?:[-+*/×÷^=]|\\times|\\cdot|or\b|and\b|to\b|[,:]\s?[0-9]|\.[0-9]|[0-9A-Za-z_]*[0-9])")
_LEAD = re.compile(
    r"^(?:(?:about|approximately|exactly|roughly|equal to|equals|is|the|total|of)\s+|[=≈~:]\s?){1,6}", re.I
)


class NumericOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `numeric`. Both tolerances are zero unless set: then 0.333 is not 1/3."""

    absolute: float = 0.0
    relative_ratio: float = 0.0
    """Of the size of the reference."""
    percent: Literal["ignore", "ratio"] = "ignore"
    """`ignore`: 50% is 50. `ratio`: 50% is 0.5."""
    reads: Literal["any", "marked"] = "any"
    """`any`: without a marked answer, the last number of the text counts. `marked`: there must be one."""

    def __post_init__(self) -> None:
        require_range("absolute", self.absolute, 0.0, 1e300)
        require_range("relative_ratio", self.relative_ratio, 0.0, 1.0)


class Numeric:
    """Passes where |answer − reference| ≤ max(absolute, relative_ratio·|reference|)."""

    kind = "numeric"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, NumericOptions)

    def begin(self, case: Case) -> Step:
        """Compare at once."""
        reference = case.given(*REFERENCE_NAMES)
        if reference is None:
            return abstained(self, "there is no reference answer")
        marked = final_answer(reference)
        wanted = self._read(marked.value) if marked else None
        if wanted is None:
            return abstained(self, f"the reference {shown(reference)} is no number")
        found = final_answer(case.answer)
        if found is None:
            return failed(self, "the answer is empty")
        value = self._said(case.answer, found)
        if value is None:
            return failed(self, f"{shown(found.value)} holds no number, or more than one")
        apart = abs(value - wanted)
        limit = max(Fraction(self.options.absolute), Fraction(self.options.relative_ratio) * abs(wanted))
        text = f"found {_written(value)}, expected {_written(wanted)}"
        return passed(self, text) if apart <= limit else failed(self, text)

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Never asked: it wants no check."""
        return abstained(self, "no check was asked for")

    def known_pass(self) -> Case | None:
        """Says the number in another spelling."""
        return Case(answer="6 times 7 makes it.\nAnswer: 42.0", references={"reference": "42"})

    def known_fail(self) -> Case | None:
        """Says a number that no tolerance allows."""
        return Case(answer="Answer: -1e301", references={"reference": "0"})

    def _said(self, text: str, found: Found) -> Fraction | None:
        if found.form != "last_line" or self._read(found.value) is not None:
            is_marked = found.form != "last_line"
            return self._read(found.value) if is_marked or self.options.reads == "any" else None
        return self._last(text) if self.options.reads == "any" else None

    def _read(self, value: str) -> Fraction | None:
        """The one number of an answer's place."""
        plain = _plain(value)
        start = _LEAD.sub("", plain)
        match = _NUMBER.match(start)
        if match and not _AFTER_BAD.match(start[match.end() :]):
            return self._number(match)
        if "=" in plain:
            after = _LEAD.sub("", plain.rsplit("=", 1)[1].strip())
            match = _NUMBER.match(after)
            return self._number(match) if match and not _AFTER_BAD.match(after[match.end() :]) else None
        if match:
            return None  # a sum, a range or a choice begins here
        numbers = [self._number(match) for match in _NUMBER.finditer(plain)]
        distinct = set(numbers)
        return numbers[0] if len(distinct) == 1 else None

    def _last(self, text: str) -> Fraction | None:
        last = None
        for match in _NUMBER.finditer(_plain(tail(text))):
            last = match
        return None if last is None else self._number(last)

    def _number(self, match: re.Match[str]) -> Fraction | None:
        digits = f"{(match['whole'] or '0').replace(',', '')}.{match['part'] or match['bare'] or '0'}"
        exponent = int(match["exponent"] or match["power"] or 0)
        under = int(match["under"] or 1)
        if len(digits) > DIGITS_MAX or abs(exponent) > EXPONENT_MAX or under == 0:
            return None
        number = Fraction(digits) * Fraction(10) ** exponent / under * _SCALES.get(match["scale"] or "", 1)
        if match["percent"] and self.options.percent == "ratio":
            number /= 100
        return -number if match["sign"] == "-" else number


def _plain(value: str) -> str:
    """ASCII digits, no dress, `\\frac` as a quotient."""
    text = _LATEX_COMMA.sub(lambda match: "," if match[0] == "{,}" else "", ascii_digits(value))
    text = _FRACTION.sub(lambda match: f" {match[1]}/{match[2].lstrip('+')} ", text)
    return without_markup(text).strip()


def _written(number: Fraction) -> str:
    """A number for a human: the decimal where it is short, else the fraction, cut."""
    if number.denominator == 1:
        text = str(number.numerator)
    else:
        text = f"{number.numerator}/{number.denominator}"
    return text if len(text) <= 60 else text[:60] + "…"
