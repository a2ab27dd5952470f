"""What the gateway reads of a program's first request: the embedder of a pool file, and what is odd about it."""

import os
from collections.abc import Mapping

from loadwise.kernel.errors import ConfigError
from loadwise.runner.embed import Embedder, EmbedderSpec, is_telling, make_embedder
from loadwise.settings import Config

from .config import GatewayConfig

SHOWN_MAX = 5
"""Odd examples that a start tells of."""


def examples_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Examples by task type, of every type."""
    return {name: spec.examples for name, spec in config.task_types.items()}


def embedder_of(config: Config, gateway: GatewayConfig, environment: Mapping[str, str] = os.environ) -> Embedder | None:
    """The embedder that reads first requests; None where there is nothing to read for.

    Raises:
        ConfigError: it cannot be made, or `task_selector.task_type` is no task type.
    """
    fixed = gateway.task_selector.task_type
    if fixed is not None and fixed not in config.task_types:
        known = ", ".join(config.task_types) or "none"
        raise ConfigError(f"gateway.task_selector.task_type is {fixed!r}, which is not in task_types: {known}")
    n_components = config.router.context.n_components
    return make_embedder(gateway.embedder, n_components, examples_of(config), gateway.task_selector, environment)


def reading_notices(config: Config, gateway: GatewayConfig, embedder: Embedder | None) -> list[str]:
    """What an operator may not expect of how task types are told."""
    examples = examples_of(config)
    n_types = sum(any(text.strip() for text in texts) for texts in examples.values())
    said = []
    kind = gateway.embedder.kind if isinstance(gateway.embedder, EmbedderSpec) else gateway.embedder
    if n_types == 1 and gateway.task_selector.rule != "off":
        said.append("one task type has examples; a type is told from another, so programs name theirs or have none")
    elif is_telling(gateway.task_selector, examples) and kind == "none":
        said.append("task types have examples, but gateway.embedder is none: programs name theirs or have none")
    confused = getattr(embedder, "confused", [])
    for name, place, other in confused[:SHOWN_MAX]:
        said.append(f"example {place + 1} of task type {name!r} looks like {other!r} to the other examples")
    if len(confused) > SHOWN_MAX:
        said.append(f"and so do {len(confused) - SHOWN_MAX} more examples")
    return said
