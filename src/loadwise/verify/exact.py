"""Exact and normalised text."""

from typing import Literal

from loadwise.kernel.fact import Fact

from .case import Case
from .check import Finding
from .options import read_options, strict_json
from .reading import REFERENCE_NAMES, TAIL_CHARACTERS, final_answer, folded
from .spec import VerifierSpec
from .verifier import State, Step, abstained, failed, passed, shown


class ExactOptions(Fact, frozen=True, kw_only=True):
    """Options of kind `exact`."""

    case_sensitive: bool = False
    punctuation: bool = False
    """Whether markup and punctuation around the answer count."""
    reads: Literal["final", "whole"] = "final"
    """`final`: what the text gives as its final answer. `whole`: the whole text is the answer."""
    alternatives: bool = False
    """The reference is a JSON list of texts, any of which is right."""


class Exact:
    """Passes where the answer is the reference, after the same normalisation of both."""

    kind = "exact"
    version = "1"

    def __init__(self, spec: VerifierSpec) -> None:
        self.options = read_options(spec, ExactOptions)

    def begin(self, case: Case) -> Step:
        """Compare at once."""
        wanted = self._wanted(case)
        if isinstance(wanted, str):
            return abstained(self, wanted)
        if self.options.reads == "whole":
            limit = max(TAIL_CHARACTERS, 2 * max(len(text) for text in wanted))
            if len(case.answer) > limit:
                return failed(self, f"the answer has {len(case.answer)} characters; at most {limit} are compared")
            value = case.answer
        else:
            found = final_answer(case.answer)
            if found is None:
                return failed(self, "the answer is empty")
            value = found.value
        folded_wanted = [self._folded(text) for text in wanted]
        if self._folded(value) in folded_wanted:
            return passed(self, f"found {shown(value)}, which is the reference")
        return failed(self, f"found {shown(value)}, expected {shown(wanted[0])}")

    def resume(self, case: Case, state: State, finding: Finding) -> Step:
        """Never asked: it wants no check."""
        return abstained(self, "no check was asked for")

    def known_pass(self) -> Case | None:
        """Says the reference."""
        return Case(answer="Paris", references={"reference": self._reference("Paris")})

    def known_fail(self) -> Case | None:
        """Says something else."""
        return Case(answer="Rome", references={"reference": self._reference("Paris")})

    def _reference(self, text: str) -> str:
        return f'["{text}"]' if self.options.alternatives else text

    def _wanted(self, case: Case) -> list[str] | str:
        """The right texts, or why there are none."""
        reference = case.given(*REFERENCE_NAMES)
        if reference is None:
            return "there is no reference answer"
        if self.options.alternatives:
            try:
                loaded = strict_json(reference)
            except ValueError as error:
                return f"the reference is no JSON list of texts: {error}"
            if not (isinstance(loaded, list) and loaded and all(isinstance(item, str) for item in loaded)):
                return "the reference is no JSON list of texts"
            wanted: list[str] = loaded
        else:
            wanted = [reference]
        if not all(self._folded(text) for text in wanted):
            return "the reference answer is empty"
        return wanted

    def _folded(self, text: str) -> str:
        return folded(text, case_sensitive=self.options.case_sensitive, punctuation=self.options.punctuation)
