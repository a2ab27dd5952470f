"""From a client's request to a turn: who asks, which program, which context; and the relay that carries it."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from loadwise.kernel import events as e
from loadwise.kernel.errors import CallerError, Conflict, Error, Unprocessable
from loadwise.kernel.ids import BackendId, ProgramId
from loadwise.router.program import FORGOTTEN_STATES
from loadwise.wire.exchange import Exchange

from .answers import respond_error
from .archive import Archived
from .backend import BackendLink, header_text
from .host import Host
from .identity import Conversation, PrefixIndex, is_final, named_program
from .meter import Meter
from .openai import ModelRequest
from .relay import Relay

TASK_TYPE_HEADER = b"x-loadwise-task-type"
DOMAIN_HEADER = b"x-loadwise-domain"
BUDGET_HEADER = b"x-loadwise-budget-s"
PRIORITY_HEADER = b"x-loadwise-priority"
BUDGET_MAX_S = 7 * 86400.0
PRIORITY_MAX = 1_000_000


class Embedder(Protocol):
    """What turns a program's first request into components of its context."""

    def components_now(self, text: str) -> tuple[float, ...] | None:
        """The components where that is cheap; None where `submit` must be used."""
        ...

    def submit(self, text: str, callback: Callable[[tuple[float, ...]], None]) -> None:
        """Compute off the loop; `callback` may be called on any thread."""
        ...


class Turns:
    """Opens turns; owns what all relays share."""

    def __init__(
        self,
        host: Host,
        links: dict[BackendId, BackendLink],
        archive: Archived,
        meter: Meter,
        *,
        embedder: Embedder | None,
        answer_max_bytes: int,
    ) -> None:
        self.host = host
        self.links = links
        self.archive = archive
        self.meter = meter
        self.prefixes = PrefixIndex()
        self.answer_max_bytes = answer_max_bytes
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
        tenant = tenant_of(headers)
        named = named_program(headers, request)
        conversation: Conversation | None = None
        program_id = named
        if program_id is None:
            program_id, conversation = self._recognise(tenant, request)
        program = self.host.router.table.by_id.get(program_id)
        if program is None and named is not None:
            self._require_new(named)
        turn_id = self.host.next_turn_id()
        relay = Relay(
            self,
            exchange,
            request,
            path,
            turn_id=turn_id,
            program_id=program_id,
            conversation=conversation,
            received_at_s=received_at_s,
        )
        self.host.relay_by_turn[turn_id] = relay
        facts = _NOTHING if program is not None else _first_turn_facts(headers, request)
        arrival = e.TurnArrived(
            at_s=self.host.now_s(),
            turn_id=turn_id,
            program_id=program_id,
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            is_implicit=named is None,
            is_final=is_final(headers),
            tenant=tenant,
            priority=_integer(headers, PRIORITY_HEADER, limit=PRIORITY_MAX),
            task_type=facts.task_type,
            domain=facts.domain,
            budget_s=facts.budget_s,
        )
        if program is not None or self._embedder is None:
            self.host.post(arrival)
        else:
            self._embed(request, arrival)

    def _recognise(self, tenant: str, request: ModelRequest) -> tuple[ProgramId, Conversation]:
        program_id, conversation = self.prefixes.find(tenant.encode(), request.messages(), self._is_open)
        return self._new_implicit_id() if program_id is None else program_id, conversation

    def _is_open(self, program_id: ProgramId) -> bool:
        program = self.host.router.table.by_id.get(program_id)
        return program is not None and program.is_open

    def _new_implicit_id(self) -> ProgramId:
        """A name that no client would choose and no earlier run has used."""
        self._n_implicit += 1
        return ProgramId(f"lw-{self.host.run_id}-{self._n_implicit}")

    def _require_new(self, program_id: ProgramId) -> None:
        """A program that has left memory is finished all the same."""
        record = self.archive.get(program_id)
        if record is not None and record.state not in FORGOTTEN_STATES:
            raise Conflict(f"program {program_id!r} has ended ({record.state})", code="program_finished")

    def _embed(self, request: ModelRequest, arrival: e.TurnArrived) -> None:
        assert self._embedder is not None
        text = request.prompt_text()
        components = self._embedder.components_now(text)
        if components is not None:
            self.host.post(replace_components(arrival, components, arrival.at_s))
            return

        def on_components(late: tuple[float, ...]) -> None:
            self.host.call_on_loop(self._post_embedded, arrival, late)

        self._embedder.submit(text, on_components)

    def _post_embedded(self, arrival: e.TurnArrived, components: tuple[float, ...]) -> None:
        if arrival.turn_id in self.host.relay_by_turn:  # else the client has left meanwhile
            self.host.post(replace_components(arrival, components, self.host.now_s()))

    def settle(self, relay: Relay, replies: list[object]) -> None:
        """A turn ended: remember the conversation of a program that is known by its messages only."""
        conversation = relay.conversation
        if conversation is not None:
            self.prefixes.settle(relay.program_id, conversation, replies)
            relay.conversation = None


def replace_components(arrival: e.TurnArrived, components: tuple[float, ...], at_s: float) -> e.TurnArrived:
    """The same arrival, with its embedding, now."""
    return msgspec.structs.replace(arrival, components=components, at_s=at_s)


def tenant_of(headers: Mapping[bytes, bytes]) -> str:
    """Eight hexadecimal digits that stand for the client's key, so that the key itself is written nowhere."""
    value = headers.get(b"authorization")
    return "" if value is None else _digest(value)


def _digest(value: bytes) -> str:
    known = _DIGESTS.get(value)
    if known is None:
        if len(_DIGESTS) >= 4096:
            _DIGESTS.clear()
        known = _DIGESTS[value] = hashlib.blake2b(value, digest_size=4).hexdigest()
    return known


_DIGESTS: dict[bytes, str] = {}


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
