"""Mathematics: expressions, fractions, sets, intervals, percentages and units, by math-verify in a worker process.

What is equal as text or as a rational number is decided here. The rest goes to `computations.math_equal`, under a limit
of time and memory, because a computer algebra system on hostile text may run for ever. What would obviously do so
(towers of powers, huge factorials, deep brackets) fails here with its reason.
"""

import re
from fractions import Fraction

from loadwise.kernel.fact import Fact

from .case import Case
from .check import Compute, Finding
from .options import read_options, require_range
from .reading import REFERENCE_NAMES, ascii_digits, boxed, encodable, final_answer, folded
from .spec import VerifierSpec
from .units import Quantity, split_unit
from .verifier import State, Step, Wanted, abstained, failed, not_carried_out, passed, shown

EXPRESSION_MAX_CHARACTERS = 1_000
BRACKETS_MAX = 24
_LONG_NUMBER = re.compile(r"[0-9]{101}")
_HUGE_POWER = re.compile(r"(?:\^|\*\*)\s{0,8}[{(]?\s{0,8}-?\s{0,8}[0-9]{5}")
_TOWER = re.compile(r"[0-9)}]\s{0,8}(?:\^|\*\*)[\s{(]{0,8}[0-9]{1,100}[\s)}]{0,8}(?:\^|\*\*)")
_FACTORIAL = re.compile(r"[0-9]{4}[\s)}]{0,8}!|!\s{0,8}!|!\s{0,8}\)\s{0,8}!")
_RATIONAL = re.compile(r"([-+]?)([0-9]{1,100})(?:\.([0-9]{1,100}))?(?:/([0-9]{1,100}))?")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:(?:\{,\}|,)[0-9]{3})+(?:\.[0-9]{1,100})?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([0-9]{1,100})\}\{([0-9]{1,100})\}")
_JOINED = re.compile(r"\\(?:text|textrm|mathrm)\{\s{0,8}(?:or|and)\s{0,8}\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_DRESS = re.compile(r"\\\\|\\(?:left|right)(?![A-Za-z])|\\displaystyle(?![A-Za-z])|\\[,!;: ()\[\]]|\\?\$")
"""The first alternative, a row's end in a matrix, is no dress: it is matched so that nothing within it is."""
_WORDS = re.compile(r"(?<![A-Za-z\\{])(pi|sin|cos|tan|ln|log|exp|infinity)(?![A-Za-z])")
_SCIENTIFIC = re.compile(r"(?<![0-9A-Za-z.])([0-9]{1,50}(?:\.[0-9]{1,50})?)[eE]([-+]?[0-9]{1,4})(?![0-9A-Za-z.])")
_ROOT = re.compile(r"√\s{0,4}([0-9]{1,50}|[A-Za-z])")
_ROOT_OF = re.compile(r"\\?sqrt\s{0,4}\(([^()]{1,200})\)")
_MIXED = re.compile(r"(?<![0-9./^_{])(-?)([0-9]{1,50})\s{1,8}([0-9]{1,50})\s{0,4}/\s{0,4}([0-9]{1,50})(?![0-9./])")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3}){1,30}(?![0-9 ,])")
_APART = re.compile(r"[0-9]\s{1,20}[0-9]")
_SIGNS = {"√": r"\sqrt", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ", "**": "^", "½": r"\frac{1}{2}"}
_SIGNS |= {"¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"}
_SENTENCE_END = re.compile(r"[.\s]{1,20}$")


class MathOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `math`."""

    float_digits: int = 6
    """Decimals to which floats are compared."""
    units: bool = True
    """Whether units count where both sides name one: 5 cm is not 5 m, and is 50 mm."""

    def __post_init__(self) -> None:
        require_range("float_digits", self.float_digits, 0, 15)


class Mathematics:
    """Passes where the final expression equals the reference. The last closed box counts, else the marked answer."""

    kind = "math"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, MathOptions)
        self._wall_s = min(spec.timeout_s, 10.0)

    def begin(self, case: Case) -> Step:
        """Decide by text or by rational numbers, or ask for the computation."""
        reference = case.given(*REFERENCE_NAMES)
        if reference is None:
            return abstained(self, "there is no reference answer")
        wanted = _expression(_stated(reference))
        if not wanted:
            return abstained(self, "the reference answer is empty")
        trouble = unbounded(wanted)
        found = final_answer(case.answer)
        value = _expression(found.value) if found else ""
        if not value:
            return failed(self, "the answer is empty")
        if folded(value, case_sensitive=True, punctuation=True) == folded(
            wanted, case_sensitive=True, punctuation=True
        ):
            return passed(self, f"found {shown(value)}, which is the reference")
        if trouble:
            return abstained(self, f"the reference {shown(wanted)} {trouble}")
        trouble = unbounded(value) or ("holds two numbers side by side" if _APART.search(value) else "")
        if trouble:
            return failed(self, f"the answer {shown(value)} {trouble}")
        return self._by_value(value, wanted)

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Read what the computation says."""
        trouble = not_carried_out(self, finding)
        if trouble:
            return trouble
        told = finding.value if isinstance(finding.value, dict) else {}
        texts = f"found {shown(str(state.get('answer')))}, expected {shown(str(state.get('reference')))}"
        if told.get("reference_read") is False:
            return abstained(self, f"the reference is no expression: {texts}")
        if told.get("answer_read") is False:
            return failed(self, f"the answer is no expression: {texts}")
        if not isinstance(told.get("equal"), bool):
            return abstained(self, f"the computation answered {shown(repr(finding.value))}")
        return passed(self, texts) if told["equal"] else failed(self, texts)

    def known_pass(self) -> Case | None:
        """Another form of the same number, which only algebra sees."""
        return Case(answer=r"So the length is \boxed{\sqrt{8}}.", references={"reference": r"2\sqrt{2}"})

    def known_fail(self) -> Case | None:
        """A number nearby."""
        return Case(answer=r"So the length is \boxed{\sqrt{8}}.", references={"reference": r"2\sqrt{3}"})

    def _by_value(self, value: str, wanted: str) -> Step:
        left, right = split_unit(value), split_unit(wanted)
        if self.options.units and left.unit and right.unit:
            if left.dimension != right.dimension:
                return failed(self, f"found the unit {shown(left.unit)}, expected {shown(right.unit)}")
        else:
            left, right = left.bare(), right.bare()
        mine, theirs = _rational(left.text), _rational(right.text)
        if mine is not None and theirs is not None:
            text = f"found {shown(value)}, expected {shown(wanted)}"
            if mine * left.factor == theirs * right.factor:
                return passed(self, text)
            if (mine * left.factor).denominator == (theirs * right.factor).denominator == 1:
                return failed(self, text)
        return self._computed(left, right)

    def _computed(self, left: Quantity, right: Quantity) -> Step:
        arguments = {
            "answer": left.scaled(),
            "reference": right.scaled(),
            "float_digits": self.options.float_digits,
        }
        state = {"answer": left.text, "reference": right.text}
        return Wanted(check=Compute(function="math_equal", arguments=arguments, wall_s=self._wall_s), state=state)


def unbounded(expression: str) -> str:
    """Why an expression may take for ever to compute with; empty where it may be tried.

    >>> unbounded("10^{10^{10}}")
    'is a tower of powers'
    >>> unbounded("e^{x^2}")
    ''
    """
    if len(expression) > EXPRESSION_MAX_CHARACTERS:
        return f"has {len(expression)} characters; at most {EXPRESSION_MAX_CHARACTERS} are computed with"
    depth = deepest = 0
    for char in expression:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > BRACKETS_MAX:
        return f"nests brackets {deepest} deep; at most {BRACKETS_MAX} are computed with"
    for pattern, what in (
        (_LONG_NUMBER, "holds a number of more than 100 digits"),
        (_HUGE_POWER, "raises to a power beyond 9999"),
        (_TOWER, "is a tower of powers"),
        (_FACTORIAL, "holds a factorial beyond 999"),
    ):
        if pattern.search(expression):
            return what
    return ""


def _stated(reference: str) -> str:
    """The reference may be a whole solution: then its last box is the answer."""
    boxes = boxed(reference)
    return boxes[-1] if boxes else reference


def _expression(value: str) -> str:
    """The expression without its dress; "a or b" is the two of them, so that nobody passes by naming several."""
    plain = _DRESS.sub(_undressed, ascii_digits(encodable(value)))
    plain = _JOINED.sub(",", plain)
    plain = _MIXED.sub(r"\1(\2+\\frac{\3}{\4})", plain)
    plain = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), plain)
    plain = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", _ROOT.sub(r"\\sqrt{\1}", plain))
    for sign, spelled in _SIGNS.items():
        plain = plain.replace(sign, spelled)
    plain = _ROOT_OF.sub(r"\\sqrt{\1}", plain)
    plain = _WORDS.sub(lambda match: "\\" + match[1].replace("infinity", "infty") + " ", plain)
    return _SENTENCE_END.sub("", plain).strip()


def _undressed(match: re.Match[str]) -> str:
    return match[0] if match[0] == "\\\\" else ""


def _rational(text: str) -> Fraction | None:
    """A plain number; None for anything that needs algebra."""
    plain = text.replace(" ", "")
    match = _FRACTION.fullmatch(plain)
    if match:
        plain = f"{match[1]}{match[2]}/{match[3]}"
    elif _THOUSANDS.fullmatch(plain):
        plain = plain.replace("{,}", "").replace(",", "")
    match = _RATIONAL.fullmatch(plain)
    if match is None or (match[4] and int(match[4]) == 0):
        return None
    number = Fraction(f"{match[2]}.{match[3] or '0'}") / int(match[4] or 1)
    return -number if match[1] == "-" else number
