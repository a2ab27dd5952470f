"""`loadwise lab selector`: how often the task type of a real request is told rightly, by the gateway's own rule.

Texts of `tasks/*.parquet` are grouped into classes, as task types would be. In each draw k texts of every class are its
examples and all others are told (ORACLE, B.3). Every text is described once for the whole run; a draw costs
milliseconds, because the rule needs products of descriptions only.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.kernel.errors import ConfigError
from loadwise.kernel.fact import Fact
from loadwise.kernel.streams import Streams
from loadwise.runner.embed import EmbedderSpec
from loadwise.verify.task_types import MARGIN_MIN, Array, Ints, Rule, fit, margins
from loadwise.verify.task_types_text import clip, describe

from .bootstrap import interval
from .outcomes import read_task_texts

GROUPS: Mapping[str, tuple[str, ...]] = {
    "swe": ("swe",),
    "terminal": ("terminal1", "terminal2"),
    "tau2": ("tau2",),
    "bfcl": ("bfcl",),
    "mmlu_pro": ("mmlu_pro",),
    "math": ("math",),
    "gsm8k": ("gsm8k",),
    "code": ("crb", "humaneval", "mbpp"),
}
"""Classes by the families they hold. `code` is one class because its families share texts."""
LEFT_OUT = frozenset({"mmlu", "gsm_hard", "bbh"})
"""Families that ask the questions of another one, or of many; they can be asked for by name."""
THREE = ("swe", "terminal", "tau2")
"""ORACLE's classes."""
RULES: tuple[Rule, ...] = ("ridge", "prototype")

TARGETS = {
    "three.k5.swe.accuracy": 0.97,
    "three.k5.tau2.accuracy": 0.98,
    "three.k5.terminal.accuracy": 0.88,
    "three.k20.terminal.accuracy": 0.94,
    "all.k5.kept_accuracy": 0.97,
    "all.k5.coverage": 0.75,
}

Say = Callable[[str], None]
Known = dict[str, npt.NDArray[np.float32]]


class SelectorConfig(Fact, frozen=True, kw_only=True):
    """Everything that the measurement is asked for.

    Raises:
        ConfigError: a value is out of its range.
    """

    tasks: str
    """Folder of parquet files, or one with a folder `tasks/`."""
    classes: dict[str, tuple[str, ...]] | None = None
    """Families by class; None takes `GROUPS`, and every family that is in none as a class of its own."""
    embedder: EmbedderSpec = EmbedderSpec(kind="minilm")
    k: tuple[int, ...] = (1, 5, 10, 20)
    n_draws: int = 200
    n_texts: int = 600
    """At most so many of each class, drawn once."""
    half: str = "all"
    """`first`, `second` or `all`: texts by a bit of their hash, so that choices can be made on one half only."""
    margin: float = MARGIN_MIN["ridge"]
    seed: int = 0

    def __post_init__(self) -> None:
        for name, limit in (("n_draws", 100_000), ("n_texts", 20_000)):
            if not 2 <= getattr(self, name) <= limit:
                raise ConfigError(f"{name[2:]} is {getattr(self, name)!r}; it must be in [2, {limit}]")
        if not self.k or any(not 1 <= k <= 1000 for k in self.k) or len(set(self.k)) != len(self.k):
            raise ConfigError(f"k is {self.k!r}; it must be different numbers in [1, 1000]")
        if self.half not in ("first", "second", "all"):
            raise ConfigError(f"half is {self.half!r}; it must be first, second or all")
        if not 0.0 <= self.margin <= 2.0:
            raise ConfigError(f"margin is {self.margin!r}; it must be in [0, 2]")


class Texts(NamedTuple):
    """The texts of a run."""

    classes: tuple[str, ...]
    texts: tuple[str, ...]
    owner: Ints
    """Class of each text."""
    family: tuple[str, ...]
    dropped: dict[str, int]
    """Left out, by reason."""

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """Family and, for want of an id of its own, the first 16 digits of the SHA-256 of each text."""
        hashes = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in self.texts)
        return tuple(zip(self.family, hashes, strict=True))


class Cell(NamedTuple):
    """One set of classes, one k, one rule."""

    name: str
    rule: Rule
    k: int
    classes: tuple[str, ...]
    accuracy: Array
    """Of each class, without abstaining, shape (n_draws, n_classes)."""
    kept: Array
    """Share told with the margin, shape (n_draws, n_classes)."""
    kept_right: Array
    """Share told rightly with the margin, shape (n_draws, n_classes)."""
    by_family: dict[str, Array]
    """Accuracy of each family of a class that has several, shape (n_draws,)."""


class Measured(NamedTuple):
    """What was found, and of what."""

    config: SelectorConfig
    texts: Texts
    cells: list[Cell]
    values: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    checks: list[dict[str, Any]]


def run_selector(config: SelectorConfig, say: Say = lambda _: None, known: Known | None = None) -> Measured:
    """Read, describe, draw, judge.

    Args:
        known: embeddings by text, of the same embedder; those of this run join them.

    Raises:
        ConfigError: the folder does not fit its format, or has fewer than two classes with enough texts.
    """
    texts = read_classes(config)
    counts = np.bincount(texts.owner)
    named = ", ".join(f"{name} {n}" for name, n in zip(texts.classes, counts, strict=True))
    left_out = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in texts.dropped.items())
    say(f"{len(texts.texts)} texts: {named}; left out: {left_out}")
    grams = make_grams(texts.texts, config.embedder, say, known)
    sets = {"all": texts.classes}
    if set(THREE) < set(texts.classes):
        sets["three"] = THREE
    cells = []
    for name, classes in sets.items():
        for k in config.k:
            if min(counts[texts.classes.index(one)] for one in classes) <= k:
                say(f"{name}: a class has no more than {k} texts, so k={k} is left out")
                continue
            cells += [_measure(config, texts, gram, rule, name, classes, k) for rule, gram in grams.items()]
    if not cells:
        raise ConfigError(f"every class needs more than {min(config.k)} texts; there are {named}")
    return _judged(config, texts, cells)


def read_classes(config: SelectorConfig) -> Texts:
    """The texts of each class: every text once, none that two classes have.

    Raises:
        ConfigError: fewer than two classes have two texts.
    """
    rows = read_task_texts(Path(config.tasks))
    class_by_family = _classes(config, {family for family, _ in rows})
    owners: dict[str, dict[str, str]] = {}
    for family, text in rows:
        if family in class_by_family:
            owners.setdefault(text, {}).setdefault(class_by_family[family], family)
    dropped = {"in_two_classes": sum(len(found) > 1 for found in owners.values())}
    texts_by_class: dict[str, list[tuple[str, str]]] = {name: [] for name in dict.fromkeys(class_by_family.values())}
    for text in sorted(owners):
        if len(owners[text]) == 1 and _is_in_half(text, config.half):
            ((name, family),) = owners[text].items()
            texts_by_class[name].append((text, family))
    kept: list[tuple[int, str, str]] = []
    names = tuple(name for name, found in texts_by_class.items() if len(found) >= 2)
    if len(names) < 2:
        raise ConfigError(
            f"{config.tasks!r}: classes with two texts: {len(names)}; it takes two, for a type is told from another"
        )
    for at, name in enumerate(names):
        found = texts_by_class[name]
        sample = sorted(found, key=lambda one: _hash(one[0], config.seed))[: config.n_texts]
        kept += [(at, text, family) for text, family in sample]
    dropped["beyond_sample"] = sum(map(len, texts_by_class.values())) - len(kept)
    owner = np.array([at for at, _, _ in kept], dtype=np.int64)
    return Texts(names, tuple(text for _, text, _ in kept), owner, tuple(family for _, _, family in kept), dropped)


def _classes(config: SelectorConfig, families: set[str]) -> dict[str, str]:
    """The class of each family that is measured."""
    if config.classes is not None:
        named = {family: name for name, members in config.classes.items() for family in members}
        missing = sorted(named.keys() - families)
        if missing:
            raise ConfigError(f"no task is of family {missing[0]!r}; known: {', '.join(sorted(families))}")
        return named
    grouped = {family: name for name, members in GROUPS.items() for family in members if family in families}
    return grouped | {family: family for family in sorted(families - grouped.keys() - LEFT_OUT)}


def _is_in_half(text: str, half: str) -> bool:
    return half == "all" or (half == "second") == bool(_hash(text, 0)[-1] & 1)


def _hash(text: str, seed: int) -> bytes:
    """What a text is drawn by: a smaller sample is part of a larger one, and a half's nearly part of the whole's."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9, salt=b"%d" % (seed % 10**15)).digest()


def make_grams(
    texts: Sequence[str], spec: EmbedderSpec, say: Say = lambda _: None, known: Known | None = None
) -> dict[Rule, Array]:
    """Products of all descriptions (`ridge`) and of all embeddings (`prototype`), by rule, shape (n, n).

    Raises:
        ConfigError: the embedder cannot be made, or its server does not answer.
    """
    embeddings = embed_texts(texts, spec, say, {} if known is None else known)
    size = 256  # a block of descriptions at a time: all of them would take a hundred kilobytes each
    n = len(texts)
    gram = np.zeros((n, n), dtype=np.float32)
    blocks = [slice(at, min(at + size, n)) for at in range(0, n, size)]
    whole = [None] * n if embeddings is None else list(embeddings)
    described = [
        np.stack([describe(text, embedding) for text, embedding in zip(texts[block], whole[block], strict=True)])
        for block in blocks
    ]
    for at, rows in enumerate(blocks):
        for other in range(at + 1):
            part = described[at] @ described[other].T
            gram[rows, blocks[other]] = part
            gram[blocks[other], rows] = part.T
    grams: dict[Rule, Array] = {"ridge": gram.astype(np.float64)}
    if embeddings is not None:
        wide = embeddings.astype(np.float64)
        grams["prototype"] = wide @ wide.T
    return grams


def embed_texts(texts: Sequence[str], spec: EmbedderSpec, say: Say, known: Known) -> npt.NDArray[np.float32] | None:
    """Unit vectors, shape (n_texts, width); None where words and shapes are all that is looked at.

    Raises:
        ConfigError: the embedder cannot be made, or its server does not answer.
    """
    if spec.kind in ("hash", "none"):
        return None
    step = 1  # padding would change the packaged model's vectors
    if spec.kind == "minilm":
        from loadwise.runner.minilm import Model

        embed: Callable[[Sequence[str]], npt.NDArray[np.float32]] = Model().embed
    else:
        from loadwise.runner.openai_embed import EmbeddingServer

        server = EmbeddingServer(spec, None if spec.key_env is None else os.environ.get(spec.key_env))
        embed, step = server.embed, server.batch_max
    missing = [text for text in dict.fromkeys(texts) if text not in known]
    for at in range(0, len(missing), step):
        batch = missing[at : at + step]
        try:
            known.update(zip(batch, embed([clip(text) for text in batch]), strict=True))
        except Exception as error:  # whatever a model or a server says of a text
            raise ConfigError(f"text {at} cannot be embedded: {error}") from error
        if at // 500 != (at + step) // 500:
            say(f"embedded {at + step} of {len(missing)} texts")
    return np.stack([known[text] for text in texts])


def _measure(
    config: SelectorConfig, texts: Texts, gram: Array, rule: Rule, name: str, classes: Sequence[str], k: int
) -> Cell:
    members = [np.flatnonzero(texts.owner == texts.classes.index(one)) for one in classes]
    owner = np.repeat(np.arange(len(classes)), k)
    rest = np.concatenate(members)
    truth = np.repeat(np.arange(len(classes)), [len(of) for of in members])
    places = {int(text): at for at, text in enumerate(rest)}
    families = np.array([texts.family[text] for text in rest])
    split = [one for one in dict.fromkeys(families) if not (families[truth == truth[families == one][0]] == one).all()]
    margin_min = config.margin if rule == "ridge" else MARGIN_MIN[rule]
    streams = Streams(config.seed)
    rows: list[tuple[Array, Array, Array]] = []
    by_family: dict[str, list[float]] = {str(one): [] for one in split}
    for draw in range(config.n_draws):
        rng = streams.at(f"examples {name} {k}", draw)  # the same examples for every rule
        examples = np.concatenate([rng.choice(of, k, replace=False) for of in members])
        linear = fit(rule, gram[np.ix_(examples, examples)], owner, len(classes))
        scores = linear.scores(gram[np.ix_(rest, examples)])
        is_told = np.ones(len(rest), dtype=np.bool_)
        is_told[[places[int(text)] for text in examples]] = False
        right = scores.argmax(axis=1) == truth
        kept = margins(scores) >= margin_min
        means = [[_mean(of[is_told & (truth == c)]) for c in range(len(classes))] for of in (right, kept, kept & right)]
        rows.append((np.array(means[0]), np.array(means[1]), np.array(means[2])))
        for one in split:
            by_family[str(one)].append(_mean(right[is_told & (families == one)]))
    accuracy, kept_share, kept_right = (np.stack(part) for part in zip(*rows, strict=True))
    found = {one: np.array(values) for one, values in by_family.items()}
    return Cell(name, rule, k, tuple(classes), accuracy, kept_share, kept_right, found)


def _mean(values: npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _judged(config: SelectorConfig, texts: Texts, cells: list[Cell]) -> Measured:
    values: dict[str, float] = {}
    ci95: dict[str, tuple[float, float]] = {}

    def put(key: str, draws: Array) -> None:
        draws = draws[np.isfinite(draws)]
        if len(draws):
            values[key], ci95[key] = float(draws.mean()), interval(draws)

    for cell in cells:
        prefix = f"{'' if cell.rule == 'ridge' else cell.rule + '.'}{cell.name}.k{cell.k}"
        for at, name in enumerate(cell.classes):
            put(f"{prefix}.{name}.accuracy", cell.accuracy[:, at])
            put(f"{prefix}.{name}.coverage", cell.kept[:, at])
            with np.errstate(invalid="ignore"):
                put(f"{prefix}.{name}.kept_accuracy", cell.kept_right[:, at] / cell.kept[:, at])
        for family, draws in cell.by_family.items():
            put(f"{prefix}.family.{family}.accuracy", draws)
        # Every class counts the same, however many texts it has.
        put(f"{prefix}.accuracy", cell.accuracy.mean(axis=1))
        put(f"{prefix}.coverage", cell.kept.mean(axis=1))
        with np.errstate(invalid="ignore"):
            put(f"{prefix}.kept_accuracy", cell.kept_right.sum(axis=1) / cell.kept.sum(axis=1))
    checks = [
        {"key": key, "op": ">=", "bound": bound, "holds": values[key] >= bound}
        for key, bound in TARGETS.items()
        if key in values
    ]
    return Measured(config, texts, cells, values, ci95, checks)
