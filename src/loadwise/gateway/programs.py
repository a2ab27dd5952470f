"""Programs over HTTP: list, show, finish, verdict."""

import json
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec

from loadwise.kernel import events as e
from loadwise.kernel.commands import ProgramRecord
from loadwise.kernel.errors import CallerError, Conflict, Error, JournalError, Overloaded, UnknownProgram, Unprocessable
from loadwise.kernel.ids import ProgramId
from loadwise.kernel.work import EndReason, ProgramState, Verdict, VerdictKind
from loadwise.router.program import Program
from loadwise.wire.exchange import Exchange

from .answers import respond_error, respond_json, whole
from .archive import Archived
from .host import Host
from .identity import program_id_in_path
from .tenants import Tenants

if TYPE_CHECKING:
    from .judging import Judging

LIST_MAX = 1000
ARTEFACTS_MAX = 64
LABEL_MAX_CHARS = 256
SHOWN_MAX_CHARS = 100
EXPLANATION_MAX_CHARS = 2000
EVIDENCE_MAX_CHARS = 16_384
AMOUNT_MAX = 1e9
_STATES = frozenset(state.value for state in ProgramState)
_VERDICTS = frozenset(kind.value for kind in VerdictKind)

OnDurable = Callable[[JournalError | None], None]
WhenDurable = Callable[[OnDurable], None]


class Programs:
    """The `/v1/programs` routes.

    Args:
        when_durable: calls back on the loop once all that was posted so far is on disk.
    """

    judging: "Judging | None" = None
    """Takes artefacts, and writes down what is to be judged; None where no verifier is run here."""

    def __init__(self, host: Host, archive: Archived, tenants: Tenants, when_durable: WhenDurable) -> None:
        self._host = host
        self._tenants = tenants
        self._archive = archive
        self._when_durable = when_durable

    def list(self, exchange: Exchange) -> None:
        """The latest programs, the latest first; `?limit=` (1000 at most) and `?state=`."""
        query = _query(exchange.query)
        limit = _limit(query.get("limit", "100"))
        state = query.get("state")
        if state is not None and state not in _STATES:
            raise CallerError(f"state {_shown(state)} is unknown; known: {', '.join(ProgramState)}", param="state")
        tenant = self._tenants.of(exchange.headers)

        def is_asked(record: ProgramRecord | Program) -> bool:
            return (state is None or record.state == state) and self._tenants.may_use(tenant, record.tenant)

        open_programs = reversed(self._host.router.table.by_id.values())
        records = [program.record() for program in islice(filter(is_asked, open_programs), limit)]
        if len(records) < limit:
            is_all = state is None and not self._tenants.keys
            archived = self._archive.recent(limit - len(records) if is_all else LIST_MAX)
            records += islice(filter(is_asked, archived), limit - len(records))
        respond_json(exchange, {"object": "list", "data": [shown(record) for record in records]})

    def show(self, exchange: Exchange, segment: bytes) -> None:
        """One program; `?evidence=true` shows what its verdict rests on as well."""
        record = self._record(exchange, program_id_in_path(segment))
        has_evidence = _query(exchange.query).get("evidence") in ("1", "true")
        respond_json(exchange, shown(record, has_evidence=has_evidence))

    def _find(self, program_id: ProgramId) -> ProgramRecord | None:
        program = self._host.router.table.by_id.get(program_id)
        return self._archive.get(program_id) if program is None else program.record()

    def _record(self, exchange: Exchange, program_id: ProgramId) -> ProgramRecord:
        """A program that whoever asks may see; to others it is unknown."""
        record = self._find(program_id)
        if record is None or not self._tenants.may_use(self._tenants.of(exchange.headers), record.tenant):
            raise UnknownProgram(f"program {program_id!r} is unknown", param="program")
        return record

    def finish(self, exchange: Exchange, segment: bytes) -> None:
        """End a program; a second time changes nothing."""
        program_id = program_id_in_path(segment)
        artefacts = _texts(exchange.body, "artefacts")
        references = _texts(exchange.body, "references")
        record = self._record(exchange, program_id)
        self._host.require_writable()  # a repeat too: what ended since the journal failed is in memory only
        if record.ended_at_s is not None:
            respond_json(exchange, _finished(record))
            return
        judging = self.judging
        if judging is not None:
            judging.intake.note_finish(program_id, artefacts, references)
        ended = e.ProgramEnded(
            at_s=self._host.now_s(), program_id=program_id, reason=EndReason.FINISH, artefacts=artefacts
        )

        def answer(trouble: Error | None) -> None:
            if trouble is not None:
                respond_error(exchange, trouble)
                return
            found = self._find(program_id)
            if found is None:  # it had no answer yet, so nothing of it is kept
                state, reason = ProgramState.CANCELLED, EndReason.FINISH
                found = msgspec.structs.replace(record, state=state, end_reason=reason)
            told = _finished(found)
            if judging is None:
                respond_json(exchange, told)
            else:  # what is to be judged survives a crash from here on
                judging.when_written(program_id, lambda: respond_json(exchange, told))

        self._host.post(ended, answer)

    def verdict(self, exchange: Exchange, segment: bytes) -> None:
        """Judge a program: durable once acknowledged, the same again changes nothing."""
        program_id = program_id_in_path(segment)
        verdict = read_verdict(exchange.body)
        record = self._record(exchange, program_id)
        if self._is_of_earlier_attempt(exchange, record, verdict):
            return
        if record.verdict is not None and not verdict.replaces(record.verdict):
            self._repeat(exchange, record, verdict)
            return
        if record.n_turns == 0 and record.ended_at_s is None:
            raise Conflict(f"program {program_id!r} has had no answer yet", code="program_unanswered")
        self._host.require_writable()
        if program_id not in self._host.router.table.by_id:
            if record.verdict is not None:
                text = f"program {program_id!r} has left memory: its verdict can be corrected no more"
                raise Conflict(text, code="verdict_final")
            # Archived without a verdict: it came too late to be credited.
            respond_json(exchange, _judged(record))
            return
        arrived = e.VerdictArrived(at_s=self._host.now_s(), program_id=program_id, verdict=verdict)
        self._host.post(arrived, lambda trouble: self._acknowledge(exchange, program_id, trouble))

    def _is_of_earlier_attempt(self, exchange: Exchange, record: ProgramRecord, verdict: Verdict) -> bool:
        """Answer what was said before of an attempt that is over, as it was answered then.

        Raises:
            Conflict: another verdict on an attempt that is judged, before the next one has begun.
        """
        for number, attempt in enumerate(record.attempts):
            is_last = record.is_unanswered and number == len(record.attempts) - 1
            if attempt.verdict == verdict and (verdict.verdict_id or is_last):
                body = _judged_attempt(record, number)
                trouble = self._host.trouble()
                if trouble is not None:
                    respond_error(exchange, trouble)
                else:
                    self._when_kept(exchange, partial(respond_json, exchange, body))
                return True
        if record.is_unanswered:
            standing = record.attempts[-1].verdict
            if standing is not None and not verdict.replaces(standing):
                text = f"program {record.program_id!r} is judged already ({standing.verdict}), and may try again"
                raise Conflict(text, code="verdict_conflict")
        return False

    def _repeat(self, exchange: Exchange, record: ProgramRecord, verdict: Verdict) -> None:
        if record.verdict != verdict:
            assert record.verdict is not None
            known = record.verdict.verdict
            raise Conflict(f"program {record.program_id!r} is judged already ({known})", code="verdict_conflict")
        # Known is not the same as kept: what was judged since the journal failed is in memory only.
        self._acknowledge(exchange, record.program_id, self._host.trouble())

    def _acknowledge(self, exchange: Exchange, program_id: ProgramId, trouble: Error | None) -> None:
        if trouble is not None:
            respond_error(exchange, trouble)
            return
        found = self._find(program_id)

        def answer() -> None:
            if found is None:
                respond_error(exchange, UnknownProgram(f"program {program_id!r} is unknown", param="program"))
            else:
                respond_json(exchange, _judged(found))

        self._when_kept(exchange, answer)

    def _when_kept(self, exchange: Exchange, answer: Callable[[], None]) -> None:
        """Answer once all that was posted so far is on disk, or say why it cannot be."""

        def on_durable(error: JournalError | None) -> None:
            if error is not None:
                respond_error(exchange, _not_durable(error))
            else:
                answer()

        try:
            self._when_durable(on_durable)
        except Error as error:
            respond_error(exchange, _not_durable(error))


def _not_durable(error: Error) -> Overloaded:
    if isinstance(error, Overloaded):
        return error
    return Overloaded(f"the verdict is not durable: {error.message}", retry_after_s=30.0, code=error.code)


def _finished(record: ProgramRecord) -> dict[str, Any]:
    return {"program": record.program_id, "state": record.state, "end_reason": record.end_reason}


def _judged_attempt(record: ProgramRecord, number: int) -> dict[str, Any]:
    """The answer to the verdict on an attempt that another one followed."""
    attempt = record.attempts[number]
    following = record.attempts[number + 1].model if number + 1 < len(record.attempts) else record.model
    return {
        "program": record.program_id,
        "credited": attempt.is_credited,
        "decision": attempt.decision_id,
        "retry": {"model": following, "attempt": number + 2},
    }


def _judged(record: ProgramRecord) -> dict[str, Any]:
    if record.is_unanswered:
        return _judged_attempt(record, len(record.attempts) - 1)
    return {"program": record.program_id, "credited": record.is_credited, "decision": record.decision_id}


def _query(query: bytes) -> dict[str, str]:
    return dict(parse_qsl(query.decode("latin-1")))


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= limit <= LIST_MAX:
        raise CallerError(f"limit is {_shown(text)}; it must be 1 to {LIST_MAX}", param="limit")
    return limit


def _object(body: bytes) -> dict[str, Any]:
    """A JSON object; NaN and infinities are read, so that they can be refused by name."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise CallerError("the body must be a JSON object", code="invalid_json")
    return value


def _texts(body: bytes, name: str) -> dict[str, str]:
    """An object of strings among the fields of a body."""
    said = _object(body).get(name) if body.strip() else None
    if said is None:
        return {}
    if not isinstance(said, dict) or not all(isinstance(v, str) and _is_text(k + v) for k, v in said.items()):
        raise CallerError(f"{name} must be an object of strings", code="invalid_type", param=name)
    if len(said) > ARTEFACTS_MAX:
        raise CallerError(f"{len(said)} {name}; {ARTEFACTS_MAX} is the limit", param=name)
    return said


def shown(record: ProgramRecord, *, has_evidence: bool = False) -> dict[str, Any]:
    """A program as it is told; what its verdict rests on only where that is asked for."""
    told: dict[str, Any] = whole(record)
    if told["verdict"] is not None and not has_evidence:
        told["verdict"].pop("evidence")
    return told


def read_verdict(body: bytes) -> Verdict:
    """A verdict as it is reported over HTTP.

    Raises:
        CallerError: not a JSON object.
        Unprocessable: a value is missing, of the wrong type or out of range.
    """
    said = _object(body)
    kind = said.get("verdict")
    if not isinstance(kind, str) or kind not in _VERDICTS:
        raise Unprocessable(f"verdict is {_shown(kind)}; it must be one of {', '.join(VerdictKind)}", param="verdict")
    score = said.get("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise Unprocessable(f"score is {_shown(score)}; it must be a number in [0, 1]", param="score")
    if score is not None and not 0 <= score <= 1:  # nor is NaN
        raise Unprocessable(f"score is {_shown(score)}; it must be in [0, 1]", param="score")
    return Verdict(
        verdict=VerdictKind(kind),
        score=None if score is None else float(score),
        verifier=_verdict_label(said, "verifier"),
        version=_verdict_label(said, "version"),
        verdict_id=_verdict_label(said, "id"),
        took_s=_amount(said, "seconds"),
        cost_usd=_amount(said, "cost_usd"),
        explanation=_verdict_label(said, "explanation", limit=EXPLANATION_MAX_CHARS),
        evidence=_evidence(said.get("evidence")),
        is_correction=_flag(said, "correction"),
    )


def _amount(said: dict[str, Any], name: str) -> float | None:
    """A finite number that is not negative, or nothing."""
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= AMOUNT_MAX:
        raise Unprocessable(f"{name} is {_shown(value)}; it must be a number in [0, {AMOUNT_MAX:g}]", param=name)
    return float(value)


def _flag(said: dict[str, Any], name: str) -> bool:
    value = said.get(name)
    if value is not None and not isinstance(value, bool):
        raise Unprocessable(f"{name} is {_shown(value)}; it must be true or false", param=name)
    return bool(value)


def _evidence(said: object) -> dict[str, str]:
    if said is None:
        return {}
    if not isinstance(said, dict) or not all(isinstance(v, str) and _is_text(k + v) for k, v in said.items()):
        raise Unprocessable("evidence must be an object of strings", param="evidence")
    n_chars = sum(len(k) + len(v) for k, v in said.items())
    if len(said) > ARTEFACTS_MAX or n_chars > EVIDENCE_MAX_CHARS:
        limit = f"{ARTEFACTS_MAX} of {EVIDENCE_MAX_CHARS} characters together is the limit"
        raise Unprocessable(f"{len(said)} pieces of evidence of {n_chars} characters; {limit}", param="evidence")
    return said


def _verdict_label(said: dict[str, Any], name: str, *, limit: int = LABEL_MAX_CHARS) -> str:
    value = said.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > limit:
        raise Unprocessable(f"{name} must be a string of at most {limit} characters", param=name)
    if not _is_text(value):
        raise Unprocessable(f"{name} holds half a surrogate pair, which is no text", param=name)
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """What a client sent, short enough for a message and free of what cannot be encoded."""
    text = repr(value)
    return text if len(text) <= SHOWN_MAX_CHARS else text[:SHOWN_MAX_CHARS] + "…"
