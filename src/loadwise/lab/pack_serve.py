"""A gateway that begins with an experience pack: its configuration and its embedder."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.reading import examples_of, require_known_type
from loadwise.kernel.errors import ConfigError
from loadwise.policy.registry import PolicySpec
from loadwise.policy.reward import RewardSpec
from loadwise.runner.embed import Embedder, EmbedderSpec
from loadwise.runner.packed import N_TOLD, packed_embedder
from loadwise.settings import Config, with_embedder

from .arms import LINEAR
from .pack import read_pack
from .pack_prior import make_prior


def with_pack(
    config: Config, gateway: GatewayConfig, environment: Mapping[str, str] = os.environ
) -> tuple[Config, Embedder]:
    """The configuration whose policy starts from the pack of `gateway`, and the embedder that reads texts with it.

    The prior goes into the policy's options as numbers, so a journal replays without the pack's file.

    Raises:
        ConfigError: the pack cannot be read or does not fit the embedder, or the policy has no use for it.
    """
    router = config.router
    if router.policy.name not in LINEAR:
        raise ConfigError(f"policy {router.policy.name!r} has no use for a pack; these have: {', '.join(LINEAR)}")
    assert gateway.pack is not None
    pack = read_pack(Path(gateway.pack))
    require_known_type(config, gateway)
    spec = gateway.embedder
    kind = spec.kind if isinstance(spec, EmbedderSpec) else spec
    n_components = 0 if kind == "none" else router.context.n_components
    context = msgspec.structs.replace(router.context, n_components=n_components + N_TOLD)
    prior = make_prior(pack, context, list(config.models), gateway.siblings).at(*prices(router.reward))
    options = {**router.policy.options, "prior": msgspec.to_builtins(prior)}
    policy = PolicySpec(name=router.policy.name, options=options)
    router = msgspec.structs.replace(router, policy=policy, context=context)
    examples, selection = examples_of(config), gateway.task_selector
    embedder = packed_embedder(spec, n_components, examples, pack.loaded, selection, environment)
    return with_embedder(msgspec.structs.replace(config, router=router), embedder.version), embedder


def prices(reward: RewardSpec) -> tuple[float, float]:
    """What a success and what a dollar are worth in a reward; the clip is left out, for most runs stay below it.

    >>> prices(RewardSpec(cost_weight=0.25, scale_usd=0.5))
    (0.75, 0.5)
    """
    if reward.clip == "none":
        return 1.0, reward.cost_weight / reward.scale_usd
    return 1.0 - reward.cost_weight, reward.cost_weight / reward.scale_usd
