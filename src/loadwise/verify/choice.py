"""Multiple choice: one letter, or the text of one choice."""

import re

from loadwise.kernel.fact import Fact

from .case import Case
from .check import Finding
from .options import read_options, require_range, strict_json
from .reading import REFERENCE_NAMES, final_answer, folded, without_markup
from .spec import VerifierSpec
from .verifier import State, Step, abstained, failed, passed, shown

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LEAD = re.compile(r"^(?:(?:the|correct|best|right|final|option|choice|answer|letter|is)\b[\s:]*){1,6}", re.IGNORECASE)
_AT_START = re.compile(r"^[\s(\[]{0,4}([A-Za-z])(?![A-Za-z0-9])(?!['’][a-z])")
_HEDGE = re.compile(r"^[\s)\].:]{0,4}(?:or|and|/|,|&|\+|;|\\text\{or\})[\s(\[]{0,4}([A-Za-z])(?![A-Za-z0-9])")
_ROW = re.compile(r"^\s{1,4}([B-HJ-Z](?![A-Za-z0-9'’-])|[AI](?=[\s.)]*$))")
"""A second letter with nothing but blanks before it: `B C`."""
_BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]")
_STANDING = re.compile(r"(?<![A-Za-z0-9'’])([B-HJ-Z])(?![A-Za-z0-9'’])")
_SAID_OF_A_CHOICE = re.compile(r" (?:is|because|since|as|seems|must|would|which|and|or|with)\b")
_NEGATION = re.compile(r"\b(?:not|isn't|neither|nor|except|or|wrong|incorrect)\b", re.IGNORECASE)


class ChoiceOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `choice`."""

    choices: int = 10
    """How many there are, A first; MMLU-Pro has up to ten. Where the case names its choices, their number counts."""

    def __post_init__(self) -> None:
        require_range("choices", self.choices, 2, len(_LETTERS))


class Choice:
    """Passes where the answer names the right letter and no other one.

    The case may give `choices`, a JSON list of their texts: then an answer may say the text instead of the letter, and
    so may the reference.
    """

    kind = "choice"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, ChoiceOptions)

    def begin(self, case: Case) -> Step:
        """Compare at once."""
        texts = self._texts(case)
        if isinstance(texts, str):
            return abstained(self, texts)
        letters = _LETTERS[: len(texts) or self.options.choices]
        reference = case.given(*REFERENCE_NAMES)
        if reference is None:
            return abstained(self, "there is no reference answer")
        wanted = _letter_of_reference(reference, letters, texts)
        if wanted is None:
            return abstained(
                self, f"the reference {shown(reference)} is none of the choices {letters[0]} to {letters[-1]}"
            )
        found = final_answer(case.answer)
        if found is None:
            return failed(self, "the answer is empty")
        said = _letter_said(found.value, letters, texts)
        if len(said) != 1:
            what = "names no choice" if not said else f"names several choices: {', '.join(said)}"
            return failed(self, f"{shown(found.value)} {what}")
        if said == wanted:
            return passed(self, f"found {said}, which is the reference")
        return failed(self, f"found {said}, expected {wanted}")

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Never asked: it wants no check."""
        return abstained(self, "no check was asked for")

    def known_pass(self) -> Case | None:
        """Names the right letter."""
        return Case(answer="It must be the second.\nAnswer: (B)", references={"reference": "B"})

    def known_fail(self) -> Case | None:
        """Names another letter."""
        return Case(answer="The answer is A.", references={"reference": "B"})

    def _texts(self, case: Case) -> list[str] | str:
        """The texts of the choices, none where they are not given, or why they cannot be read."""
        given = case.given("choices")
        if given is None:
            return []
        try:
            loaded = strict_json(given)
        except ValueError as error:
            return f"choices is no JSON list of texts: {error}"
        if not isinstance(loaded, list) or not all(isinstance(item, str) for item in loaded):
            return "choices is no JSON list of texts"
        if not 2 <= len(loaded) <= len(_LETTERS):
            return f"choices has {len(loaded)} entries; it must have 2 to {len(_LETTERS)}"
        return loaded


def _letter_of_reference(reference: str, letters: str, texts: list[str]) -> str | None:
    plain = without_markup(reference).strip(" ().[]")
    if len(plain) == 1 and plain.upper() in letters:
        return plain.upper()
    return _letter_of_text(reference, letters, texts)


def _letter_of_text(value: str, letters: str, texts: list[str]) -> str | None:
    """The letter whose text is said, where exactly one is."""
    same = [letter for letter, text in zip(letters, texts, strict=False) if folded(text) == folded(value)]
    return same[0] if len(same) == 1 else None


def _letter_said(value: str, letters: str, texts: list[str]) -> str:
    """The distinct letters that an answer names, as one string; of one letter where it is clear."""
    by_text = _letter_of_text(value, letters, texts)
    if by_text is not None:
        return by_text
    plain = _LEAD.sub("", without_markup(value)).strip()
    start = _AT_START.match(plain)
    if start and start[1].upper() in letters:
        first, rest = start[1].upper(), plain[start.end() :]
        if not _is_word(start[1], rest):
            hedge = _HEDGE.match(rest) or _ROW.match(rest)
            others = {hedge[1].upper()} if hedge else set()
            others |= set(_BRACKETED.findall(rest))
            return "".join(sorted({first} | (others & set(letters))))
    bracketed = set(_BRACKETED.findall(plain)) & set(letters)
    named = bracketed or set(_STANDING.findall(plain)) & set(letters)
    if len(named) == 1 and _NEGATION.search(plain):
        return ""
    return "".join(sorted(named))


def _is_word(letter: str, rest: str) -> bool:
    """Whether a leading letter is the article of a sentence ("A dog"), or "I"."""
    follows_word = rest[:1] == " " and len(rest) > 2 and rest[1:3].isalpha()
    return follows_word and (letter.islower() or letter in "AI") and not _SAID_OF_A_CHOICE.match(rest)
