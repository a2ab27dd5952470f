"""Which program a request belongs to.

First match: `X-Session-ID`; a program's name in the body; the session headers of known harnesses; else the longest
known conversation that the request continues; else the request is its own program. There is never a shared default.

Theory of operation of the prefix rule. Agents append to their conversation, so a request without a name continues a
program if it extends, by at least one message, the *whole* list of exactly one open program under the same key: what
was asked before and the reply that we relayed. Messages are compared by a normal form, because clients rewrite what
they send back. A list is known by a chained hash, so a lookup costs one hash per message. Two programs with equal lists
are both not found, and neither is a program whose turn is open, for its list is about to change: a wrong merge poisons
credit, a missed one only starts a new program. Agents that compact their history begin a new program unless they send a
name; `n_unmatched` counts conversations that arrive in the middle. Nor is a conversation compared that is longer than
we read (`openai.MESSAGES_MAX` and its fellows), for one client must not take everybody's time: `n_unread` counts those.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from loadwise.kernel.errors import CallerError
from loadwise.kernel.ids import PROGRAM_ID_MAX_CHARS, ProgramId

from .openai import UNREADABLE, ModelRequest, part_text, text_of

SESSION_HEADER = b"x-session-id"
HARNESS_HEADERS = (
    b"x-claude-code-session-id",
    b"x-dynamo-session-id",
    b"x-litellm-session-id",
    b"x-bf-session-id",
    b"x-opencode-session",
    b"session_id",
)
FINAL_HEADERS = (b"x-loadwise-final", b"x-dynamo-session-final")

_encode = msgspec.json.Encoder(order="deterministic").encode


def check_program_id(text: str, *, param: str) -> ProgramId:
    """A program id as a client may name it.

    Raises:
        CallerError: empty, longer than 256 characters, or with a character that cannot be printed.
    """
    if not 1 <= len(text) <= PROGRAM_ID_MAX_CHARS:
        limit = f"1 to {PROGRAM_ID_MAX_CHARS} characters"
        raise CallerError(f"the program id has {len(text)} characters; it must have {limit}", param=param)
    if not text.isprintable():
        raise CallerError("the program id has characters that cannot be printed", param=param)
    return ProgramId(text)


def program_id_in_path(segment: bytes) -> ProgramId:
    """A percent-encoded program id of a request's path."""
    try:
        return check_program_id(unquote(segment.decode("ascii"), errors="strict"), param="program")
    except UnicodeDecodeError as error:
        raise CallerError("the program id in the path is not valid UTF-8", param="program") from error


def named_program(headers: Mapping[bytes, bytes], request: ModelRequest) -> ProgramId | None:
    """The program as the client names it, or None where it names none."""
    value = headers.get(SESSION_HEADER)
    if value is not None:
        return check_program_id(_text(value, "X-Session-ID"), param="X-Session-ID")
    in_body = request.program_id
    if in_body is not None:
        return check_program_id(in_body, param="program_id")
    for name in HARNESS_HEADERS:
        value = headers.get(name)
        if value:
            return check_program_id(_text(value, name.decode()), param=name.decode())
    return None


def is_final(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client says that the program ends with this turn."""
    for name in FINAL_HEADERS:
        value = headers.get(name)
        if value is not None and value.strip().lower() in (b"1", b"true"):
            return True
    return False


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CallerError(f"the header {name} is not valid UTF-8", param=name) from error


def normal_form(message: Any) -> bytes:
    """What of a message counts for identity: role, text without surrounding white space, tool calls with parsed
    arguments, and whatever of the content is not text. Reasoning, refusals, ids and cache hints do not count."""
    if not isinstance(message, dict):
        return _canonical(message)
    role, content = message.get("role"), message.get("content")
    text = text_of(content).strip()
    if role == "assistant" and text.startswith("<think>"):
        text = _THOUGHT.sub("", text, count=1)
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    function_call = message.get("function_call")
    if isinstance(function_call, dict):
        calls = [*calls, {"function": function_call}]
    return _canonical([role, text, [_call(call) for call in calls], _beside_text(content)])


_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_UNCOUNTED_PARTS = frozenset({"refusal", "thinking", "redacted_thinking", "reasoning"})


def _beside_text(content: Any) -> list[Any]:
    """What of a content is neither text nor of the kinds that do not count."""
    if content is None or isinstance(content, str):
        return []
    if not isinstance(content, list):
        return [content]
    return [_bare(part) for part in content if part_text(part) is None and not _is_uncounted(part)]


def _is_uncounted(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _UNCOUNTED_PARTS


def _bare(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {key: value for key, value in part.items() if key not in ("id", "cache_control")}


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if not isinstance(function, dict):
        return {key: value for key, value in call.items() if key not in ("id", "index", "cache_control")}
    return [function.get("name"), _parsed(function.get("arguments"))]


def _parsed(arguments: Any) -> Any:
    """Arguments as the values that they mean, however they are written; none at all means an empty object."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        return _decode_arguments(arguments if isinstance(arguments, str) else _canonical(arguments))
    except UNREADABLE:
        return arguments.strip() if isinstance(arguments, str) else arguments


def _number(written: str) -> float | int | str:
    """1.0 and 1 are one number to those who parse and write JSON."""
    value = float(written)
    if not math.isfinite(value):
        return written
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


_decode_arguments = msgspec.json.Decoder(float_hook=_number).decode


def _canonical(value: Any) -> bytes:
    """Equal bytes for equal values, whatever the order of keys."""
    try:
        return _encode(value)
    except (ValueError, OverflowError, RecursionError):
        pass  # half a surrogate pair, a number that is too long
    try:
        return json.dumps(value, sort_keys=True).encode()
    except (ValueError, RecursionError):
        return os.urandom(16)  # cannot be compared: equal to nothing


def chain(start: bytes, messages: Iterable[Any]) -> list[bytes]:
    """Hash of every prefix of a conversation that begins with `start`, 16 bytes each."""
    hashes = []
    for message in messages:
        start = hashlib.blake2b(start + normal_form(message), digest_size=16).digest()
        hashes.append(start)
    return hashes


def start_of(key: bytes) -> bytes:
    """Where the conversations of one API key begin."""
    return hashlib.blake2b(key, digest_size=16, person=b"loadwise key").digest()


class Conversation(NamedTuple):
    """One request's whole list, and whether a known program is continued by it."""

    request_hash: bytes
    program_id: ProgramId | None


class PrefixIndex:
    """Open programs by the hash of their whole conversation.

    Args:
        is_open: whether a program still takes turns.
    """

    def __init__(self, is_open: Callable[[ProgramId], bool], *, programs_max: int = 100_000) -> None:
        self._is_open = is_open
        self._programs_max = programs_max
        self._programs_by_hash: dict[bytes, set[ProgramId]] = {}
        self._hashes_by_program: dict[ProgramId, tuple[bytes, ...]] = {}
        """Those whose last turn ended longest ago come first."""
        self._busy: set[ProgramId] = set()
        """Programs that are being continued: their turn is open."""
        self.n_matched = 0
        self.n_unmatched = 0
        """Requests that look like the middle of a conversation nobody knows (compacted history, a restart)."""
        self.n_ambiguous = 0
        self.n_unread = 0
        """Requests whose conversation is longer than we read, or cannot be read: each is a program of its own."""

    def __len__(self) -> int:
        return len(self._hashes_by_program)

    def find(self, key: bytes, messages: list[Any]) -> Conversation | None:
        """The conversation to hand to `settle`, with the one program that it continues, if any.

        None where there are no messages to know it by.
        """
        hashes = chain(start_of(key), messages)
        if not hashes:
            return None
        for prefix in reversed(hashes[:-1]):
            programs = self._open_programs(prefix)
            if len(programs) == 1 and programs[0] not in self._busy:
                self.n_matched += 1
                self._busy.add(programs[0])
                return Conversation(hashes[-1], programs[0])
            if programs:
                self.n_ambiguous += 1
                return Conversation(hashes[-1], None)
        if any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages[:-1]):
            self.n_unmatched += 1
        return Conversation(hashes[-1], None)

    def _open_programs(self, known: bytes) -> list[ProgramId]:
        """Open programs with this list; closed ones are forgotten on the way."""
        programs = list(self._programs_by_hash.get(known, ()))
        for program_id in programs:
            if not self._is_open(program_id):
                self.forget(program_id)
        return [program_id for program_id in programs if program_id in self._hashes_by_program]

    def settle(self, program_id: ProgramId, conversation: Conversation, replies: list[Any] | None) -> None:
        """The turn ended: remember the list with each reply that was relayed.

        Args:
            replies: None where the turn got no answer, then the program stands where it stood; empty where the answer
                could not be followed, then nothing continues the program.
        """
        self._busy.discard(program_id)
        if replies is not None:
            self.forget(program_id)
            known = dict.fromkeys(chain(conversation.request_hash, [reply])[0] for reply in replies)
            if known:
                self._hashes_by_program[program_id] = tuple(known)
            for value in known:
                self._programs_by_hash.setdefault(value, set()).add(program_id)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Programs that have ended lie at the begin; a few are dropped a turn, so that they do not pile up."""
        for _ in range(4):
            oldest = next(iter(self._hashes_by_program), None)
            if oldest is None or (len(self) <= self._programs_max and self._is_open(oldest)):
                return
            self.forget(oldest)

    def forget(self, program_id: ProgramId) -> None:
        """The program is over, or its list is known no more."""
        self._busy.discard(program_id)
        for value in self._hashes_by_program.pop(program_id, ()):
            programs = self._programs_by_hash[value]
            programs.discard(program_id)
            if not programs:
                del self._programs_by_hash[value]
