"""What a verifier will need of an open program: what it was asked, and its last answer.

Kept in memory only for programs whose verifier is run here, and only until they end; then it goes to the spool. Nothing
of it enters the journal.
"""

from collections.abc import Callable
from itertools import islice

import msgspec

from loadwise.kernel.ids import ProgramId
from loadwise.runner.config import VerificationConfig
from loadwise.verify.case import Case

from .openai import UNREADABLE, is_readable, read_leniently, text_of

SWEPT_AT_ONCE = 3
GRACE_S = 60.0
"""A program may take so long to come from its first request into the router's table."""
LENIENT_MAX_BYTES = 1024 * 1024


class Kept:
    """Of one program."""

    __slots__ = ("answer", "artefacts", "lack", "noted_at_s", "prompt", "references")

    def __init__(self, prompt: str = "", noted_at_s: float = 0.0) -> None:
        self.prompt = prompt
        self.noted_at_s = noted_at_s
        self.answer = ""
        self.artefacts: dict[str, str] = {}
        self.references: dict[str, str] = {}
        self.lack = ""
        """Why there is nothing to judge."""

    @property
    def n_bytes(self) -> int:
        """Roughly what it takes."""
        texts = (*self.artefacts.values(), *self.references.values())
        return 500 + len(self.prompt) + len(self.answer) + sum(map(len, texts))


class Intake:
    """Open programs' texts, bounded together; the oldest give way, and are abstained on."""

    def __init__(self, config: VerificationConfig) -> None:
        self._config = config
        self._kept: dict[ProgramId, Kept] = {}
        self.n_bytes = 0
        self.n_dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._kept

    def note_prompt(self, program_id: ProgramId, prompt: str, references: dict[str, str], now_s: float) -> None:
        """A program's first request."""
        kept = Kept(_cut(prompt, self._config.prompt_max_bytes), now_s)
        kept.references = dict(references)
        self._put(program_id, kept)

    def note_answer(self, program_id: ProgramId, answer: str | None) -> None:
        """A turn was answered; one without text (a call of a tool) leaves the last text standing.

        Args:
            answer: None where it could not be followed.
        """
        kept = self._kept.get(program_id)
        if kept is None or answer == "":
            return
        limit = self._config.answer_max_bytes
        if answer is None:
            kept.lack, text = "its last answer could not be read", ""
        elif len(answer) > limit:
            kept.lack, text = f"its last answer has {len(answer)} characters; {limit} is the limit", ""
        else:
            kept.lack, text = "", answer
        self._change(program_id, kept, answer=text)

    def note_finish(self, program_id: ProgramId, artefacts: dict[str, str], references: dict[str, str]) -> None:
        """The agent says that it is over, and what it leaves behind."""
        kept = self._kept.get(program_id)
        if kept is not None:
            self._change(program_id, kept, artefacts=artefacts, references={**kept.references, **references})

    def sweep(self, is_open: Callable[[ProgramId], bool], now_s: float) -> None:
        """Look at the few that were not looked at longest; drop those of programs that are over, however they ended."""
        for program_id in list(islice(self._kept, SWEPT_AT_ONCE)):
            kept = self._kept.pop(program_id)
            if is_open(program_id) or now_s - kept.noted_at_s < GRACE_S:
                self._kept[program_id] = kept
            else:
                self.n_bytes -= kept.n_bytes

    def restore(self, program_id: ProgramId, case: Case, now_s: float) -> None:
        """After a restart: what the spool knows of a program that is open again."""
        kept = Kept(case.prompt, now_s)
        kept.answer, kept.artefacts, kept.references = case.answer, case.artefacts, case.references
        self._put(program_id, kept)

    def take(self, program_id: ProgramId) -> Kept | None:
        """Hand over what is known, and forget it."""
        kept = self._kept.pop(program_id, None)
        if kept is not None:
            self.n_bytes -= kept.n_bytes
        return kept

    def _put(self, program_id: ProgramId, kept: Kept) -> None:
        self.take(program_id)
        self._kept[program_id] = kept
        self.n_bytes += kept.n_bytes
        self._bound()

    def _change(self, program_id: ProgramId, kept: Kept, **texts: object) -> None:
        self.n_bytes -= kept.n_bytes
        for name, value in texts.items():
            setattr(kept, name, value)
        self.n_bytes += kept.n_bytes
        self._bound()

    def _bound(self) -> None:
        while self.n_bytes > self._config.kept_max_bytes and len(self._kept) > 1:
            self.n_dropped += 1
            self.take(next(iter(self._kept)))


def _cut(text: str, limit: int) -> str:
    """Its begin and its end: instructions stand at the one, the question often at the other."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Answer).decode
_decode_text = msgspec.json.Decoder(str).decode


def answer_text(body: bytes) -> str | None:
    """The text of the first choice of a whole answer; empty where it has none, None where it cannot be read.

    >>> answer_text(b'{"choices": [{"message": {"content": "42"}}]}'), answer_text(b"[]")
    ('42', None)
    """
    try:
        choices = _decode(body).choices
        if not choices or choices[0].message is None:
            return "" if not choices else choices[0].text or ""
        content = choices[0].message.content
        if bytes(memoryview(content)[:1]) == b'"':
            return _decode_text(content)
    except (*UNREADABLE, UnicodeDecodeError):
        return _lenient_text(body)
    # Parts, or null: read as plain values, where they are few enough.
    return text_of(read_leniently(content)) if is_readable(content, LENIENT_MAX_BYTES) else None


def _lenient_text(body: bytes) -> str | None:
    """As above for an answer with half a surrogate pair in it."""
    answer = read_leniently(body) if is_readable(body, LENIENT_MAX_BYTES) else None
    try:
        return text_of(answer["choices"][0]["message"]["content"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None
