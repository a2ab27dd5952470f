"""What a journal holds: a header that says how to build the machine again, then one entry per event.

Theory of operation. A machine is a function of its events, so a journal needs the events only; commands come back by
replaying them. What is kept of the commands is (a) in full whatever records a choice or what it earned
(`RecordDecision`, `RecordPropensities`, `RecordCredit`), because what-if, estimators and `why` read them without a
machine, and (b) a digest of all commands of the entry, by which replay proves that it has regenerated the same ones
(law L7).

The digest leaves out the floats of those records: their last bits differ between machines whose linear algebra sums in
another order. Replay compares them with a tolerance to what was recorded, and all else exactly.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal, TypeVar

import msgspec

import loadwise
from loadwise.kernel.commands import Command, Dispatch, RecordCredit, RecordDecision, RecordPropensities, SetTimer
from loadwise.kernel.errors import Error, SchemaMismatch
from loadwise.kernel.events import Event
from loadwise.kernel.fact import Fact

SCHEMA_VERSION = 1
"""Rises when a reader of the version before would misunderstand an entry; a field added with a default is no reason."""

_Fact = TypeVar("_Fact", bound=Fact)

HostKind = Literal["live", "sim"]


class Header(Fact, frozen=True, kw_only=True):
    """How to build the machine that handled the entries of one segment."""

    schema_version: int
    loadwise_version: str
    config: dict[str, Any]
    """The effective configuration as plain builtins."""
    config_digest: str
    seed: int
    python_version: str
    numpy_version: str
    epoch_unix_s: float
    """What `at_s` counts from; 0 in simulation."""
    host: HostKind = "live"
    commit: str = ""
    first_sequence: int = 1
    """Sequence of the segment's first entry."""
    starts_at_s: float = 0.0
    """`at_s` of the entry before the segment; 0 in the first segment."""

    def continues(self, other: "Header") -> bool:
        """Whether entries under this header may follow entries under `other` without building the machine anew."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[Any, ...]:
        versions = (self.schema_version, self.loadwise_version, self.python_version, self.numpy_version)
        return (*versions, self.config_digest, self.seed, self.host, self.commit)


class Entry(Fact, frozen=True, kw_only=True):
    """One event, and what the machine answered."""

    sequence: int
    event: Event
    decisions: tuple[RecordDecision, ...] = ()
    propensities: tuple[RecordPropensities, ...] = ()
    credits: tuple[RecordCredit, ...] = ()
    digest: int = 0
    """64 bits over the commands, see `digest_commands`; 0 where there were none."""


def make_header(
    config: Mapping[str, Any],
    *,
    seed: int,
    host: HostKind = "live",
    epoch_unix_s: float = 0.0,
    commit: str = "",
) -> Header:
    """A header for a run that starts now with this software.

    Args:
        config: the effective configuration, plain builtins (`msgspec.to_builtins`).
    """
    return Header(
        schema_version=SCHEMA_VERSION,
        loadwise_version=loadwise.__version__,
        config=dict(config),
        config_digest=digest_config(config),
        seed=seed,
        python_version=platform.python_version(),
        numpy_version=version("numpy"),
        epoch_unix_s=epoch_unix_s,
        host=host,
        commit=commit,
    )


def digest_config(config: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that are equal for equal configurations, whatever the order of their keys."""
    return hashlib.blake2b(_sorted.encode(dict(config)), digest_size=8).hexdigest()


def _plain_number(value: Any) -> Any:
    """Encode a numpy scalar as the number it is: a machine may answer with one where a float is declared."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} cannot be journaled")
    return item()


_RECORDS = (RecordDecision, RecordPropensities, RecordCredit)

_sorted = msgspec.msgpack.Encoder(order="deterministic")
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_encode = _encoder.encode
_decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
_decode_entry = msgspec.msgpack.Decoder(Entry).decode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_blake2b = hashlib.blake2b


class _Version(msgspec.Struct):
    schema_version: int


_decode_version = msgspec.msgpack.Decoder(_Version).decode


def digest_commands(commands: Sequence[Command]) -> int:
    """64 bits that are equal for equal commands, on every machine and under every hash seed; 0 for none.

    Commands pass through their own schema first, so that `60` and `60.0` in a field of float seconds are the same: a
    replayed event has been through it too, and what it leads to must not look different.
    """
    if not commands:
        return 0
    if len(commands) == 1 and type(commands[0]) is Dispatch and type(commands[0].wait_s) is float:
        # What a turn of a bound program leads to; the same bytes as below.
        return int.from_bytes(_blake2b(_encode([commands]), digest_size=8).digest(), "little") or 1
    exact: list[Command] = []
    parts: list[Any] = [exact]
    is_plain = True
    for i, command in enumerate(commands):
        if isinstance(command, Dispatch):
            # The commonest two: a look at their one float is cheaper than the way through the schema.
            is_plain = is_plain and type(command.wait_s) is float
            exact.append(command)
        elif isinstance(command, SetTimer):
            is_plain = is_plain and type(command.fires_at_s) is float
            exact.append(command)
        elif isinstance(command, RecordDecision):
            parts.append((i, _decision_skeleton(command)))
        elif isinstance(command, RecordPropensities):
            parts.append((i, (command.decision_id, len(command.propensities))))
        elif isinstance(command, RecordCredit):
            mark = ("withdrawn",) if command.is_withdrawn else ()
            parts.append((i, (command.decision_id, command.program_id, command.model, *mark)))
        else:
            is_plain = False
            exact.append(command)
    if not is_plain:
        parts[0] = _decode_commands(_encode(exact))
    return int.from_bytes(_blake2b(_encode(parts), digest_size=8).digest(), "little") or 1


def _decision_skeleton(decision: RecordDecision) -> tuple[Any, ...]:
    return (
        decision.decision_id,
        decision.program_id,
        decision.policy,
        decision.learner_version,
        decision.context_version,
        decision.chosen,
        decision.reason,
        decision.slot,
        [(c.candidate, c.n_running, c.n_held) for c in decision.candidates],
        *(() if decision.routed is None else (decision.routed,)),  # older journals have none
        *((decision.unaffordable,) if decision.unaffordable else ()),  # absent as from journals that know it not
    )


def make_entry(sequence: int, event: Event, commands: Sequence[Command]) -> Entry:
    """The entry that journals `event` and the machine's answer to it."""
    if not commands:
        return Entry(sequence=sequence, event=event)
    digest = digest_commands(commands)
    records = [c for c in commands if isinstance(c, _RECORDS)]
    if not records:
        return Entry(sequence=sequence, event=event, digest=digest)
    return Entry(
        sequence=sequence,
        event=event,
        decisions=tuple([c for c in records if isinstance(c, RecordDecision)]),
        propensities=tuple([c for c in records if isinstance(c, RecordPropensities)]),
        credits=tuple([c for c in records if isinstance(c, RecordCredit)]),
        digest=digest,
    )


def tame(fact: _Fact) -> _Fact:
    """The fact with what MessagePack cannot hold made holdable: lone surrogates escaped, integers cut to 64 bits.

    A client or an engine may send such things; one of them must not end the journal.
    """
    return msgspec.convert(_tame(msgspec.to_builtins(fact, enc_hook=_plain_number)), type(fact))


def _tame(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, -(1 << 63)), (1 << 63) - 1)
    if isinstance(value, dict):
        return {_tame(key): _tame(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tame(item) for item in value]
    return value


def encode_entry(entry: Entry) -> bytes:
    """The entry as MessagePack."""
    return _encode(entry)


def decode_entry(payload: bytes) -> Entry:
    """The entry of a payload.

    Raises:
        SchemaMismatch: the payload is not an entry of this schema version.
    """
    try:
        return _decode_entry(payload)
    except (msgspec.MsgspecError, Error, RecursionError) as error:
        raise SchemaMismatch(f"an entry does not follow schema version {SCHEMA_VERSION}: {error}") from error


def encode_header(header: Header) -> bytes:
    """The header as MessagePack."""
    return _encode(header)


def decode_header(payload: bytes) -> Header:
    """The header of a payload.

    Raises:
        SchemaMismatch: another schema version, or not a header.
    """
    try:
        found = _decode_version(payload).schema_version
        if found != SCHEMA_VERSION:
            raise SchemaMismatch(f"schema version is {found!r}; this loadwise reads {SCHEMA_VERSION}")
        return _decode_header(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SchemaMismatch(f"a header does not follow schema version {SCHEMA_VERSION}: {error}") from error
