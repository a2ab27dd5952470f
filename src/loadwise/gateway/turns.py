"""From a client's request to a turn: who asks, which program, which context; and the relay that carries it."""

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadwise.kernel import events as e
from loadwise.kernel.errors import CallerError, Conflict, Error, Overloaded, UnknownModel, Unprocessable
from loadwise.kernel.ids import BackendId, ModelId, ProgramId, TurnId
from loadwise.router.program import FORGOTTEN_STATES
from loadwise.runner.embed import UNREAD, Embedder, Reading
from loadwise.wire.exchange import Exchange

from .answers import respond_error
from .archive import WatchedArchive
from .backend import BackendLink, header_text
from .host import Host
from .identity import Conversation, PrefixIndex, is_final, named_program
from .meter import Meter
from .openai import ModelRequest
from .relay import Relay
from .tenants import Tenants, key_of

if TYPE_CHECKING:
    from .judging import Judging

TASK_TYPE_HEADER = b"x-loadwise-task-type"
DOMAIN_HEADER = b"x-loadwise-domain"
BUDGET_HEADER = b"x-loadwise-budget-s"
PRIORITY_HEADER = b"x-loadwise-priority"
"""A whole number that is journaled with the turn and its dispatch; no engine is told of it yet."""
BUDGET_MAX_S = 7 * 86400.0
PRIORITY_MAX = 1_000_000
EMBEDDING_MAX_S = 2.0
"""A first turn goes on without its embedding, and without an inferred task type, when that takes longer."""
SHOWN_MAX_CHARS = 100
"""Of what a client sent, in the message that refuses it."""


class Turns:
    """Opens turns; owns what all relays share."""

    def __init__(
        self,
        host: Host,
        links: dict[BackendId, BackendLink],
        archive: WatchedArchive,
        meter: Meter,
        tenants: Tenants,
        *,
        embedder: Embedder | None,
        answer_max_bytes: int,
        keep_alive_s: float = 15.0,
        task_type: str | None = None,
    ) -> None:
        self.judging: Judging | None = None
        """Keeps what verifiers will need; None where none is run here."""
        self.host = host
        self.links = links
        self.archive = archive
        self.meter = meter
        self.tenants = tenants
        self.prefixes = PrefixIndex(self._is_open)
        self.answer_max_bytes = answer_max_bytes
        self.keep_alive_s = keep_alive_s
        self.note_overhead = meter.overhead_s.observe
        self._embedder = embedder
        self._task_type = task_type
        """Of every program that names none; None leaves it to the embedder."""
        self._n_implicit = 0
        self.n_types_by_origin = dict.fromkeys(("named", "told", "abstained", "none"), 0)
        """First requests by where their task type comes from."""

    def header_text(self, program_id: ProgramId) -> bytes:
        """A program id as a header value."""
        return header_text(program_id)

    def take(self, exchange: Exchange, path: bytes, *, prompt_field: str) -> None:
        """Open a turn for a request for a model call, or answer why not."""
        received_at_s = self.host.now_s()
        try:
            request = ModelRequest(exchange.body, prompt_field=prompt_field)
            self.host.require_writable()
            exchange.body = b""  # the request keeps what it needs of it
            self._open(exchange, request, path, received_at_s)
        except Error as error:
            self.meter.count_refusal(error.status)
            respond_error(exchange, error)

    def _open(self, exchange: Exchange, request: ModelRequest, path: bytes, received_at_s: float) -> None:
        headers = exchange.headers
        by_id = self.host.router.table.by_id
        self.require_offered(request.model)
        program_id = named_program(headers, request)
        program = None if program_id is None else by_id.get(program_id)
        is_named = program_id is not None
        tenant = self.tenants.of(headers)
        if program_id is not None and program is None:
            self._require_new(program_id, tenant)
        elif program is not None:
            self._require_own(program.program_id, tenant, program.tenant)
        # Everything that may refuse the request comes before anything that remembers it.
        facts = _NOTHING if program is not None else _first_turn_facts(headers, request)
        priority = _integer(headers, PRIORITY_HEADER, limit=PRIORITY_MAX)
        conversation: Conversation | None = None
        if program_id is None:
            conversation = self.prefixes.find(key_of(headers), request.messages())
            if request.is_unread:
                self.prefixes.n_unread += 1
            program_id = conversation.program_id if conversation is not None else None
            program = None if program_id is None else by_id.get(program_id)
            if program_id is None:
                program_id = self._new_implicit_id()
        elif program is not None and program.is_implicit:
            self.prefixes.forget(program_id)  # from here on its messages alone do not tell where it stands
        reading = UNREAD if program is not None else self._read(request)
        if self.judging is not None:
            self.judging.note_turn(program_id, request)
        if reading is not None:
            request.forget_messages()
        relay = Relay(
            self,
            exchange,
            request,
            path,
            turn_id=TurnId(0),
            program_id=program_id,
            conversation=conversation,
            received_at_s=received_at_s,
        )
        arrival = e.TurnArrived(
            at_s=self.host.now_s(),
            turn_id=TurnId(0) if reading is None else self._enter(relay),
            program_id=program_id,
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            n_answers=request.n_answers,
            is_implicit=not is_named,
            is_final=is_final(headers),
            tenant=tenant,
            priority=priority,
            task_type=facts.task_type or (self._task_type if program is None else None),
            domain=facts.domain,
            budget_s=facts.budget_s,
        )
        if reading is None:
            self._wait_for_reading(relay, request, arrival)
        elif program is None:
            self.host.post(self._as_read(arrival, reading))
        else:
            self.host.post(arrival)
        if request.is_stream:
            relay.await_place()

    def ask_inside(self, exchange: Exchange, program_id: ProgramId, body: bytes, *, tenant: str) -> None:
        """Open a turn of our own: a program without task type, so that nobody judges it.

        Raises:
            Error: the model is not in the pool, or no work is taken now.
        """
        received_at_s = self.host.now_s()
        request = ModelRequest(body, prompt_field="messages")
        self.host.require_writable()
        self.require_offered(request.model)
        relay = Relay(
            self,
            exchange,
            request,
            b"/chat/completions",
            turn_id=TurnId(0),
            program_id=program_id,
            conversation=None,
            received_at_s=received_at_s,
        )
        self.host.post(
            e.TurnArrived(
                at_s=self.host.now_s(),
                turn_id=self._enter(relay),
                program_id=program_id,
                model=request.model,
                prompt_tokens=request.prompt_tokens,
                max_output_tokens=request.max_output_tokens,
                n_answers=request.n_answers,
                tenant=tenant,
            )
        )

    def _enter(self, relay: Relay) -> TurnId:
        """Give the turn its number, at the last moment: one that never arrives at the stack uses up none."""
        turn_id = relay.turn_id = self.host.next_turn_id()
        self.host.relay_by_turn[turn_id] = relay
        return turn_id

    def offered_models(self) -> list[ModelId]:
        """Models that a backend of the pool serves."""
        backends = self.host.router.backends
        return [name for name in backends.model_by_id if backends.all_of(name)]

    def require_offered(self, model: str) -> None:
        """Refuse a model that is not in the pool.

        Raises:
            UnknownModel: names those that are.
        """
        if model != e.AUTO and not self.host.router.backends.all_of(ModelId(model)):
            shown = model if len(model) <= SHOWN_MAX_CHARS else model[:SHOWN_MAX_CHARS] + "…"
            known = ", ".join([e.AUTO, *self.offered_models()])
            raise UnknownModel(f"the model {shown!r} is not in the pool; known: {known}", param="model")

    def _is_open(self, program_id: ProgramId) -> bool:
        program = self.host.router.table.by_id.get(program_id)
        return program is not None and program.is_open

    def _new_implicit_id(self) -> ProgramId:
        """A name that no earlier run has used and no client has thought of."""
        while True:
            self._n_implicit += 1
            program_id = ProgramId(f"lw-{self.host.run_id}-{self._n_implicit}")
            if program_id not in self.host.router.table.by_id:
                return program_id

    def _require_own(self, program_id: ProgramId, tenant: str, owner: str) -> None:
        """A program takes turns under the key that opened it only."""
        if not self.tenants.may_use(tenant, owner):
            text = f"program {program_id!r} was opened under another API key"
            raise Conflict(text, code="program_of_another_key")

    def _require_new(self, program_id: ProgramId, tenant: str) -> None:
        """A program that has left memory is finished all the same."""
        try:
            record = self.archive.get(program_id)
        except Overloaded:
            return  # told and counted there; a program that may be new is served
        if record is not None:
            self._require_own(program_id, tenant, record.tenant)
        if record is not None and record.state not in FORGOTTEN_STATES:
            raise Conflict(f"program {program_id!r} has ended ({record.state})", code="program_finished")

    def _read(self, request: ModelRequest) -> Reading | None:
        """What is read of the request; None where it must be waited for."""
        if self._embedder is None:
            return UNREAD
        return self._embedder.read_now(request.prompt_text())

    def _wait_for_reading(self, relay: Relay, request: ModelRequest, arrival: e.TurnArrived) -> None:
        assert self._embedder is not None
        late = asyncio.get_running_loop().call_later(EMBEDDING_MAX_S, self._post_read, relay, arrival, UNREAD)

        def on_reading(reading: Reading) -> None:
            late.cancel()
            self._post_read(relay, arrival, reading)

        text = request.prompt_text()
        request.forget_messages()
        self._embedder.submit(text, lambda reading: self.host.call_on_loop(on_reading, reading))

    def _post_read(self, relay: Relay, arrival: e.TurnArrived, reading: Reading) -> None:
        if relay.turn_id == 0 and relay.is_awaited:  # else it went on without, or the client has left meanwhile
            turn_id = self._enter(relay)
            self.host.post(
                msgspec.structs.replace(self._as_read(arrival, reading), turn_id=turn_id, at_s=self.host.now_s())
            )
            relay.await_place()

    def _as_read(self, arrival: e.TurnArrived, reading: Reading) -> e.TurnArrived:
        """With components, and with the task type that was told where the client named none."""
        task_type = arrival.task_type or reading.told.task_type
        origin = (
            "named" if arrival.task_type else "told" if task_type else "abstained" if reading.told.nearest else "none"
        )
        self.n_types_by_origin[origin] += 1
        if reading is UNREAD:
            return arrival
        return msgspec.structs.replace(arrival, components=reading.components, task_type=task_type)

    def settle(self, relay: Relay, replies: list[object] | None) -> None:
        """A turn ended: remember the conversation of a program that is known by its messages only.

        Args:
            replies: what was relayed; None where the turn got no answer.
        """
        conversation = relay.conversation
        if conversation is not None:
            self.prefixes.settle(relay.program_id, conversation, replies)
            relay.conversation = None


class _Facts(NamedTuple):
    """What only a program's first turn tells."""

    task_type: str | None = None
    domain: str | None = None
    budget_s: float | None = None


_NOTHING = _Facts()


def _first_turn_facts(headers: Mapping[bytes, bytes], request: ModelRequest) -> _Facts:
    budget = headers.get(BUDGET_HEADER)
    return _Facts(
        task_type=_label(headers, TASK_TYPE_HEADER, request.metadata.task_type) or None,
        domain=_label(headers, DOMAIN_HEADER, request.metadata.domain) or None,
        budget_s=None if budget is None else _budget_s(budget),
    )


LABEL_MAX_CHARS = 128


def _label(headers: Mapping[bytes, bytes], name: bytes, in_body: str | None) -> str | None:
    value = headers.get(name)
    text = in_body if value is None else value.decode("utf-8", "replace")
    if text is not None and (len(text) > LABEL_MAX_CHARS or not text.isprintable()):
        raise CallerError(
            f"{name.decode()} has {len(text)} characters; it must have at most {LABEL_MAX_CHARS}, all printable",
            param=name.decode(),
        )
    return text


def _budget_s(value: bytes) -> float:
    try:
        budget_s = float(value)
    except ValueError:
        budget_s = math.nan
    if not 0.0 < budget_s <= BUDGET_MAX_S:
        text = f"X-Loadwise-Budget-S is {value.decode('latin-1')!r}; it must be a number in (0, {BUDGET_MAX_S:g}]"
        raise Unprocessable(text, param="X-Loadwise-Budget-S")
    return budget_s


def _integer(headers: Mapping[bytes, bytes], name: bytes, *, limit: int) -> int:
    value = headers.get(name)
    if value is None:
        return 0
    try:
        number = int(value)
    except ValueError:
        number = limit + 1
    if abs(number) > limit:
        text = f"{name.decode()} is {value.decode('latin-1')!r}; it must be a whole number within ±{limit}"
        raise Unprocessable(text, param=name.decode())
    return number
