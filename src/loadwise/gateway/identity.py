"""Which program a request belongs to.

First match: `X-Session-ID`; a program's name in the body; the session headers of known harnesses; else the longest
known conversation that the request continues; else the request is its own program. There is never a shared default.

Theory of operation of the prefix rule. Agents append to their conversation, so a request without a name continues a
program if it extends, by at least one message, the *whole* list of exactly one open program under the same key: what
was asked before and the reply that we relayed. Messages are compared by a normal form, because clients rewrite what
they send back. A list is known by a chained hash, so a lookup costs one hash per message. A program with a turn open
is not found (its list is about to change); two programs with equal lists are both not found: a wrong merge poisons
credit, a missed one only starts a new program. Agents that compact their history begin a new program unless they send a
name; `n_unmatched` counts conversations that arrive in the middle.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from loadwise.kernel.errors import CallerError
from loadwise.kernel.ids import PROGRAM_ID_MAX_CHARS, ProgramId

from .openai import ModelRequest, text_of

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

_canonical = msgspec.json.Encoder(order="deterministic").encode


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
    if in_body:
        return check_program_id(in_body, param="program_id")
    for name in HARNESS_HEADERS:
        value = headers.get(name)
        if value:
            return check_program_id(_text(value, name.decode()), param=name.decode())
    return None


def is_final(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client says that the program ends with this turn."""
    return any(headers.get(name, b"0").strip().lower() in (b"1", b"true") for name in FINAL_HEADERS)


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CallerError(f"the header {name} is not valid UTF-8", param=name) from error


def normal_form(message: Any) -> bytes:
    """What of a message counts for identity: role, text without surrounding white space, tool calls with parsed
    arguments, and any part that is not text. Reasoning, refusals, ids and cache hints do not count."""
    if not isinstance(message, dict):
        return _canonical(message)
    content = message.get("content")
    others = []
    if isinstance(content, list):
        others = [_bare(p) for p in content if isinstance(p, dict) and p.get("type") not in _UNCOUNTED_PARTS]
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    function_call = message.get("function_call")
    if isinstance(function_call, dict):
        calls = [*calls, {"function": function_call}]
    return _canonical([message.get("role"), text_of(content).strip(), [_call(c) for c in calls], others])


_UNCOUNTED_PARTS = frozenset({"text", "refusal", "thinking", "reasoning", "input_text", "output_text"})


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in ("id", "cache_control")}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = arguments.strip()
    return [function.get("name"), arguments]


def chain(start: bytes, messages: Iterable[Any]) -> list[bytes]:
    """Hash of every prefix of a conversation that begins with `start`, 16 bytes each."""
    hashes = []
    for message in messages:
        start = hashlib.blake2b(start + normal_form(message), digest_size=16).digest()
        hashes.append(start)
    return hashes


class Conversation:
    """One implicit program's whole list, as hashes: of the open request, and of what we knew before it."""

    __slots__ = ("before", "request_hash")

    def __init__(self, request_hash: bytes, before: tuple[bytes, ...]) -> None:
        self.request_hash = request_hash
        self.before = before


class PrefixIndex:
    """Open programs by the hash of their whole conversation."""

    def __init__(self, *, programs_max: int = 100_000) -> None:
        self._programs_max = programs_max
        self._programs_by_hash: dict[bytes, set[ProgramId]] = {}
        self._hashes_by_program: dict[ProgramId, tuple[bytes, ...]] = {}
        self.n_matched = 0
        self.n_unmatched = 0
        """Requests that look like the middle of a conversation nobody knows (compacted history, a restart)."""
        self.n_ambiguous = 0

    def __len__(self) -> int:
        return len(self._hashes_by_program)

    def find(
        self, key: bytes, messages: list[Any], is_open: Callable[[ProgramId], bool]
    ) -> tuple[ProgramId | None, Conversation]:
        """The one program that the conversation continues, or None; and the conversation to hand to `settle`."""
        hashes = chain(key, messages)
        for prefix in reversed(hashes[:-1]):
            programs = self._open_programs(prefix, is_open)
            if not programs:
                continue
            if len(programs) > 1:
                self.n_ambiguous += 1
                break
            program_id = programs[0]
            self.n_matched += 1
            return program_id, Conversation(hashes[-1], self.forget(program_id))
        if any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages[:-1]):
            self.n_unmatched += 1
        return None, Conversation(hashes[-1], ())

    def _open_programs(self, known: bytes, is_open: Callable[[ProgramId], bool]) -> list[ProgramId]:
        """Open programs with this list; closed ones are forgotten on the way."""
        programs = sorted(self._programs_by_hash.get(known, ()))
        for program_id in programs:
            if not is_open(program_id):
                self.forget(program_id)
        return [program_id for program_id in programs if program_id in self._hashes_by_program]

    def settle(self, program_id: ProgramId, conversation: Conversation, replies: list[Any]) -> None:
        """The turn ended: remember the list with each reply that was relayed, or as it was before where none was."""
        if replies:
            known = tuple(chain(conversation.request_hash, [reply])[0] for reply in replies)
        else:
            known = conversation.before
        self.forget(program_id)
        if not known:
            return
        if len(self._hashes_by_program) >= self._programs_max:
            self.forget(next(iter(self._hashes_by_program)))
        self._hashes_by_program[program_id] = known
        for value in known:
            self._programs_by_hash.setdefault(value, set()).add(program_id)

    def forget(self, program_id: ProgramId) -> tuple[bytes, ...]:
        """The program is over, or its next turn is open. Returns what was known of it."""
        known = self._hashes_by_program.pop(program_id, ())
        for value in known:
            programs = self._programs_by_hash[value]
            programs.discard(program_id)
            if not programs:
                del self._programs_by_hash[value]
        return known
