"""What the policies see of each task of a stream: family and domain, and components of its text where there is one.

The vector is that of `policy.context`: a bias, a one-hot of the family (the task type of a replay), a one-hot of the
domain within the family, and the components that the gateway's own embedder gives. Where no task has a text the
components, which would all be zero, are left out: a ridge learner chooses the same without them.
"""

from collections import Counter
from collections.abc import Sequence
from threading import Event
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loadwise.policy.context import ContextSpec
from loadwise.runner.embed import Reading, make_embedder

from .stream import Stream

DOMAINS_MAX = 256
"""The rarest domains beyond this get no feature of their own."""


class Contexts(NamedTuple):
    """One vector per task, and what its numbers mean."""

    spec: ContextSpec
    x: npt.NDArray[np.float64]
    """Shape (n_tasks, n_features)."""
    domains: tuple[str | None, ...]
    """Name of each task's domain, unique over families."""
    n_embedded: int
    """Tasks with components."""


def make_contexts(stream: Stream, embedder: str, n_components: int) -> Contexts:
    """The contexts of every task.

    Args:
        embedder: `none`, `hash` or `minilm`; `minilm` fits its components to texts of the stream (never to outcomes).

    Raises:
        ConfigError: the embedder is unknown or not installed, or the vector would be too long.
    """
    families = [stream.families[index] for index in stream.family]
    domains = tuple(
        f"{family}/{domain}" if domain is not None else None
        for family, domain in zip(families, stream.domains, strict=True)
    )
    components, version = _components(stream, families, embedder, n_components)
    counts = Counter(domain for domain in domains if domain is not None)
    named = sorted(counts, key=lambda domain: (-counts[domain], domain))[:DOMAINS_MAX]
    has_text = any(components)
    spec = ContextSpec(
        task_types=stream.families,
        domains=tuple(sorted(named)),
        n_components=n_components if has_text else 0,
        embedder=version if has_text else "",
    )
    rows = zip(families, domains, components, strict=True)
    x = np.array([spec.features(family, domain, found) for family, domain, found in rows])
    return Contexts(spec, x, domains, sum(map(bool, components)))


def _components(
    stream: Stream, families: Sequence[str], kind: str, n_components: int
) -> tuple[list[tuple[float, ...]], str]:
    """Components of each task, empty without a text, and the version of what made them."""
    examples: dict[str, list[str]] = {}
    for family, text in zip(families, stream.texts, strict=True):
        if text is not None:
            examples.setdefault(family, []).append(text)
    embedder = make_embedder(kind, n_components, examples)
    if embedder is None:
        return [()] * stream.n_tasks, ""
    found: list[tuple[float, ...]] = [()] * stream.n_tasks
    try:
        for index, text in enumerate(stream.texts):
            if text is None:
                continue
            now = embedder.read_now(text)
            if now is not None:
                found[index] = now.components
                continue
            # One at a time: the embedder's queue is short, and what finds it full is not embedded.
            done = Event()

            def on_reading(reading: Reading, index: int = index, done: Event = done) -> None:
                found[index] = reading.components
                done.set()

            embedder.submit(text, on_reading)
            done.wait()
        return found, embedder.version
    finally:
        embedder.close()
