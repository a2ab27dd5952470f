"""What a policy has learned, as bytes: named arrays and counts under the policy's name and configuration.

A dump holds the caches beside the sums. Rebuilding a cache would differ in the last bit, and a learner that continues
from a dump must choose exactly as the one that never stopped (law L7).
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import SchemaMismatch
from loadwise.kernel.fact import Fact

FORMAT = 1
"""Version of this form; a reader refuses any other."""

_DTYPE = "<f8"


class StoredArray(Fact, frozen=True, kw_only=True):
    """A float64 array as its little-endian bytes in C order."""

    shape: tuple[int, ...]
    data: bytes


class LearnerState(Fact, frozen=True, kw_only=True):
    """Everything that a policy learned."""

    policy: str
    format: int
    options: dict[str, Any] = {}
    """The configuration under which it was learned."""
    names: tuple[str, ...] = ()
    """Candidates in the order of the arrays' first axis."""
    counts: dict[str, tuple[int, ...]] = {}
    arrays: dict[str, StoredArray] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """A writable copy of array `name`.

        Raises:
            SchemaMismatch: it is missing, has another shape, or holds a value that is not finite.
        """
        stored = self.arrays.get(name)
        if stored is None:
            raise SchemaMismatch(f"dump of policy {self.policy!r} lacks array {name!r}; it has {sorted(self.arrays)}")
        if stored.shape != shape or len(stored.data) != 8 * math.prod(shape):
            raise SchemaMismatch(
                f"array {name!r} of policy {self.policy!r} has shape {stored.shape} in {len(stored.data)} bytes;"
                f" expected {shape} in {8 * math.prod(shape)}"
            )
        values = np.frombuffer(stored.data, dtype=_DTYPE).reshape(shape).astype(np.float64)
        if not np.isfinite(values).all():
            raise SchemaMismatch(f"array {name!r} of policy {self.policy!r} holds values that are not finite")
        return values

    def count(self, name: str, length: int) -> list[int]:
        """Counts `name`, one per candidate or a single one.

        Raises:
            SchemaMismatch: they are missing, of another length, or negative.
        """
        values = self.counts.get(name, ())
        if len(values) != length or any(value < 0 for value in values):
            raise SchemaMismatch(
                f"counts {name!r} of policy {self.policy!r} are {values}; expected {length} numbers >= 0"
            )
        return list(values)


def dump_state(
    policy: str,
    options: Mapping[str, Any],
    *,
    names: tuple[str, ...] = (),
    counts: Mapping[str, tuple[int, ...]] | None = None,
    arrays: Mapping[str, npt.NDArray[np.float64]] | None = None,
) -> bytes:
    """Encode a `LearnerState`; equal states give equal bytes."""
    stored = {
        name: StoredArray(shape=array.shape, data=array.astype(_DTYPE).tobytes())
        for name, array in (arrays or {}).items()
    }
    state = LearnerState(
        policy=policy,
        format=FORMAT,
        options=dict(options),
        names=names,
        counts=dict(counts or {}),
        arrays=stored,
    )
    return msgspec.msgpack.encode(state, order="sorted")


def load_state(data: bytes, policy: str, options: Mapping[str, Any]) -> LearnerState:
    """Decode what `dump_state` wrote, for the same policy and configuration only.

    Raises:
        SchemaMismatch: not such bytes, another format, another policy, or another configuration; says which.
    """
    try:
        state = msgspec.msgpack.decode(data, type=LearnerState)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SchemaMismatch(f"not a dump of policy {policy!r} ({len(data)} bytes): {error}") from error
    if state.format != FORMAT:
        raise SchemaMismatch(f"dump of policy {state.policy!r} has format {state.format}; this version reads {FORMAT}")
    if state.policy != policy:
        raise SchemaMismatch(f"dump is of policy {state.policy!r}; this is policy {policy!r}")
    for key in sorted({*state.options, *options}):
        there, here = state.options.get(key), options.get(key)
        if there != here:
            raise SchemaMismatch(f"dump of policy {policy!r} was learned with {key}={there!r}; here {key}={here!r}")
    if len(set(state.names)) != len(state.names):
        raise SchemaMismatch(f"dump of policy {policy!r} names a candidate twice: {state.names}")
    return state
