"""What a verifier judges: one finished program, its answer, its artefacts, and what would be right."""

from typing import Any

from loadwise.kernel.fact import Fact


class Case(Fact, frozen=True, kw_only=True):
    """One finished program as its verifier sees it."""

    program_id: str = ""
    task_type: str | None = None
    domain: str | None = None
    prompt: str = ""
    """The text of the initial request."""
    answer: str = ""
    """The text of the last reply. Hostile: any length, any characters, lone surrogates included."""
    artefacts: dict[str, str] = {}
    """What the agent left behind, by name (`ProgramEnded.artefacts`): a patch, a final state, a program text."""
    references: dict[str, str] = {}
    """What would be right, by name, from a source that the judged model cannot write: the task's metadata or the
    configuration. It wins over artefacts of the same name."""
    nonce: str = ""
    """Random, fresh for each run of a verifier, set by the runner: fences off what must not be forged."""

    def given(self, *names: str) -> str | None:
        """The first of the named texts, references before artefacts; None where there is none."""
        for texts in (self.references, self.artefacts):
            for name in names:
                if name in texts:
                    return texts[name]
        return None

    def to_builtins(self) -> dict[str, Any]:
        """The case as a user's own command or webhook gets it; the nonce stays with us."""
        return {
            "program_id": self.program_id,
            "task_type": self.task_type,
            "domain": self.domain,
            "prompt": self.prompt,
            "answer": self.answer,
            "artefacts": self.artefacts,
            "references": self.references,
        }
