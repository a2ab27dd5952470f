"""Experience packs: what other models or other tasks taught, as one JSON file (docs/formats/pack.md).

A pack holds numbers and names, never a text and never code: reading one runs nothing. It is refused where anything
about it is off, in one line that says what.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.policy.reading import N_BINS, N_MARKS, Reader
from loadwise.policy.reading import VERSION as READING
from loadwise.runner.packed import Loaded

FORMAT = "loadwise-pack"
VERSION = 1
BYTES_MAX = 16 * 1024 * 1024
FAMILIES_MAX, DOMAINS_MAX, MODELS_MAX = 256, 2048, 1024
NUMBER_MAX = 1e6


class Baseline(Fact, frozen=True, kw_only=True):
    """How hard and how dear one kind of task is for a middling model, where its text was read and where not."""

    n_tasks: int
    success: float
    """Logit, added to the text's word (families), or to the family's (domains)."""
    success_blind: float
    cost: float
    """Log of the cost over the mean, as `success`."""
    cost_blind: float


class Ability(Fact, frozen=True, kw_only=True):
    """What one model is worth in one family."""

    n_tasks: int
    success: float
    """Its success minus a middling model's, in [-1, 1], shrunk by evidence."""
    cost_usd: float | None = None
    """What it pays per unit of g; None where no cost is known."""


class TextModel(Fact, frozen=True, kw_only=True):
    """Linear in the features of a text: `policy.reading.row`, then the embedder's vector where there is one."""

    reading: str
    """Version of the rule that reads marks and words."""
    success: tuple[float, ...]
    """Weights of the logit of success, one per feature."""
    success_bias: float
    cost: tuple[float, ...]
    """Weights of the log cost, one per feature."""
    cost_bias: float


class Provenance(Fact, frozen=True, kw_only=True):
    """Where a pack comes from."""

    n_runs: int
    n_tasks: int
    models: tuple[str, ...]
    excluded_models: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    """First 12 hexadecimal digits of the SHA-256 of `family<TAB>task_id` of each task, sorted: who was told what."""
    made_by: str = ""


class Pack(Fact, frozen=True, kw_only=True):
    """A whole pack."""

    format: str
    version: int
    licence: str
    """Of the outcomes it was fitted on; a pack is no freer than they are."""
    provenance: Provenance
    embedder: str
    """`none`, or the version of the embedder whose vectors the text model reads."""
    families: dict[str, Baseline]
    domains: dict[str, Baseline]
    """By `family/domain`."""
    models: dict[str, dict[str, Ability]]
    """By model, then family."""
    text: TextModel | None = None
    sha256: str = ""
    """Of everything else."""

    @property
    def reader(self) -> Reader | None:
        """The text model ready for use; None where the pack has none."""
        text = self.text
        if text is None:
            return None
        return Reader(np.array(text.success), text.success_bias, np.array(text.cost), text.cost_bias)

    @property
    def loaded(self) -> Loaded:
        """What an embedder needs of it."""
        return Loaded(self.reader, self.embedder, self.digest)

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, sha256=""), order="sorted")).hexdigest()


def task_mark(family: str, task_id: str) -> str:
    """What a pack remembers a task by: enough to say whether it was fitted on it, not what it was.

    >>> task_mark("swe", "a-1")
    'e5e57bc1cba4'
    """
    return hashlib.sha256(f"{family}\t{task_id}".encode("utf-8", "surrogatepass")).hexdigest()[:12]


def write_pack(pack: Pack, path: Path) -> None:
    """Write with its hash.

    Raises:
        ConfigError: `read_pack` would refuse it; nothing was written.
    """
    where = f"pack {str(path)!r}"
    _require_bounds(where, pack)
    sealed = msgspec.structs.replace(pack, sha256=pack.digest)
    data = msgspec.json.format(msgspec.json.encode(sealed, order="sorted"), indent=1) + b"\n"
    if len(data) > BYTES_MAX:
        raise ConfigError(f"{where} would have {len(data)} bytes; the limit of a pack is {BYTES_MAX}")
    path.write_bytes(data)


def read_pack(path: Path) -> Pack:
    """Read and check.

    Raises:
        ConfigError: it cannot be read, is too large, is no pack, of another version, damaged, or holds numbers out of
            range; says which.
    """
    where = f"pack {str(path)!r}"
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if len(data) > BYTES_MAX:
        raise ConfigError(f"{where} is larger than {BYTES_MAX} bytes, the limit of a pack")
    _require_version(where, data)
    try:
        pack = msgspec.json.decode(data, type=Pack)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} does not fit its format: {error}") from error
    if pack.sha256 != pack.digest:
        raise ConfigError(
            f"{where} is damaged: its content has SHA-256 {pack.digest[:12]}, it says {pack.sha256[:12]!r}"
        )
    _require_bounds(where, pack)
    return pack


def _require_version(where: str, data: bytes) -> None:
    """Said before anything else: a pack of another version may have other fields."""
    try:
        said: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    kind = said.get("format") if isinstance(said, dict) else None
    if kind != FORMAT:
        raise ConfigError(f"{where} is not an experience pack: its format is {kind!r}, expected {FORMAT!r}")
    if said.get("version") != VERSION:
        raise ConfigError(f"{where} has version {said.get('version')!r}; this version of loadwise reads {VERSION}")


def _require_bounds(where: str, pack: Pack) -> None:
    for name, n, limit in (
        ("families", len(pack.families), FAMILIES_MAX),
        ("domains", len(pack.domains), DOMAINS_MAX),
        ("models", len(pack.models), MODELS_MAX),
    ):
        if n > limit:
            raise ConfigError(f"{where} has {n} {name}; the limit is {limit}")
    if not pack.families:
        raise ConfigError(f"{where} speaks of no family")
    for model, abilities in pack.models.items():
        for family in abilities:
            if family not in pack.families:
                raise ConfigError(f"{where}: model {model!r} has an ability in family {family!r}, which the pack lacks")
    if pack.text is not None:
        _require_text(where, pack.text)
    for name, value in _numbers(pack):
        if not (math.isfinite(value) and abs(value) <= NUMBER_MAX):
            raise ConfigError(f"{where}: {name} is {value!r}; it must be within ±{NUMBER_MAX:g}")


def _require_text(where: str, text: TextModel) -> None:
    if text.reading != READING:
        raise ConfigError(f"{where} reads texts by {text.reading!r}; this version of loadwise by {READING!r}")
    n = len(text.success)
    if n != len(text.cost) or not N_MARKS + N_BINS <= n <= N_MARKS + N_BINS + 4096:
        raise ConfigError(
            f"{where}: its text model has {n} and {len(text.cost)} weights; expected {N_MARKS + N_BINS}"
            " and those of the embedder, in both"
        )


def _numbers(pack: Pack) -> Iterator[tuple[str, float]]:
    for kind, baselines in (("family", pack.families), ("domain", pack.domains)):
        for name, baseline in baselines.items():
            for field in ("n_tasks", "success", "success_blind", "cost", "cost_blind"):
                yield f"{field} of {kind} {name!r}", getattr(baseline, field)
    for model, abilities in pack.models.items():
        for family, ability in abilities.items():
            where = f"model {model!r} in family {family!r}"
            yield f"n_tasks of {where}", ability.n_tasks
            # Twice out of range where it is beyond what a share can be, or no price.
            yield f"success of {where}", ability.success if -1.0 <= ability.success <= 1.0 else math.inf
            if ability.cost_usd is not None:
                yield f"cost_usd of {where}", ability.cost_usd if ability.cost_usd >= 0.0 else math.inf
    if pack.text is not None:
        for field in ("success", "cost"):
            for place, value in enumerate(getattr(pack.text, field)):
                yield f"weight {place} of {field} of the text model", value
            yield f"{field}_bias of the text model", getattr(pack.text, f"{field}_bias")
