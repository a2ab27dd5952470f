"""From a client's request to a turn: who asks, which program, which context; and the relay that carries it."""

import asyncio
import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from loadwise.kernel import events as e
from loadwise.kernel.errors import CallerError, Conflict, Error, Overloaded, UnknownModel, Unprocessable
from loadwise.kernel.ids import BackendId, ModelId, ProgramId, TurnId
from loadwise.router.program import FORGOTTEN_STATES
from loadwise.runner.embed import Embedder
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

TASK_TYPE_HEADER = b"x-loadwise-task-type"
DOMAIN_HEADER = b"x-loadwise-domain"
BUDGET_HEADER = b"x-loadwise-budget-s"
PRIORITY_HEADER = b"x-loadwise-priority"
"""A whole number that is journaled with the turn and its dispatch; no engine is told of it yet."""
BUDGET_MAX_S = 7 * 86400.0
PRIORITY_MAX = 1_000_000
EMBEDDING_MAX_S = 2.0
"""A first turn goes on without its embedding when that takes longer."""
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
    ) -> None:
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
        self._n_implicit = 0

    def link(self, backend_id: BackendId) -> BackendLink:
        """The way to a backend."""
        return self.links[backend_id]

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
        components = () if program is not None else self._components(request)
        if components is not None:
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
            turn_id=TurnId(0) if components is None else self._enter(relay),
            program_id=program_id,
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            is_implicit=not is_named,
            is_final=is_final(headers),
            tenant=tenant,
            priority=priority,
            task_type=facts.task_type,
            domain=facts.domain,
            budget_s=facts.budget_s,
            components=components or (),
        )
        if components is None:
            self._embed(relay, request, arrival)
        else:
            self.host.post(arrival)
            relay.await_place()

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

    def _components(self, request: ModelRequest) -> tuple[float, ...] | None:
        """The request's embedding; None where it must be waited for."""
        if self._embedder is None:
            return ()
        return self._embedder.components_now(request.prompt_text())

    def _embed(self, relay: Relay, request: ModelRequest, arrival: e.TurnArrived) -> None:
        assert self._embedder is not None
        late = asyncio.get_running_loop().call_later(EMBEDDING_MAX_S, self._post_embedded, relay, arrival, ())

        def on_components(components: tuple[float, ...]) -> None:
            late.cancel()
            self._post_embedded(relay, arrival, components)

        text = request.prompt_text()
        request.forget_messages()
        self._embedder.submit(text, lambda components: self.host.call_on_loop(on_components, components))

    def _post_embedded(self, relay: Relay, arrival: e.TurnArrived, components: tuple[float, ...]) -> None:
        if relay.turn_id == 0 and relay.is_awaited:  # else it went on without, or the client has left meanwhile
            turn_id = self._enter(relay)
            self.host.post(
                msgspec.structs.replace(arrival, turn_id=turn_id, components=components, at_s=self.host.now_s())
            )
            relay.await_place()

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
