"""A gateway that begins with an experience pack: its configuration and its embedder."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from loadwise.kernel.errors import ConfigError
from loadwise.policy.registry import PolicySpec
from loadwise.policy.reward import RewardSpec
from loadwise.runner.embed import Embedder
from loadwise.runner.packed import N_TOLD, packed_embedder
from loadwise.settings import Config, with_embedder

from .arms import LINEAR
from .pack import read_pack
from .pack_prior import make_prior


def with_pack(config: Config, embedder_kind: str, path: Path, siblings: Mapping[str, str]) -> tuple[Config, Embedder]:
    """The configuration whose policy starts from the pack, and the embedder that reads texts with it.

    The prior goes into the policy's options as numbers, so a journal replays without the pack's file.

    Raises:
        ConfigError: the pack cannot be read or does not fit the embedder, or the policy has no use for it.
    """
    router = config.router
    if router.policy.name not in LINEAR:
        raise ConfigError(f"policy {router.policy.name!r} has no use for a pack; these have: {', '.join(LINEAR)}")
    pack = read_pack(path)
    n_components = 0 if embedder_kind == "none" else router.context.n_components
    examples = {name: spec.examples for name, spec in config.task_types.items()}
    embedder = packed_embedder(embedder_kind, n_components, examples, pack.reader, pack.embedder, pack.digest)
    try:
        context = msgspec.structs.replace(router.context, n_components=n_components + N_TOLD)
        prior = make_prior(pack, context, list(config.models), siblings).at(*prices(router.reward))
    except ConfigError:
        embedder.close()
        raise
    options = {**router.policy.options, "prior": msgspec.to_builtins(prior)}
    policy = PolicySpec(name=router.policy.name, options=options)
    router = msgspec.structs.replace(router, policy=policy, context=context)
    return with_embedder(msgspec.structs.replace(config, router=router), embedder.version), embedder


def prices(reward: RewardSpec) -> tuple[float, float]:
    """What a success and what a dollar are worth in a reward; the clip is left out, for most runs stay below it.

    >>> prices(RewardSpec(cost_weight=0.25, scale_usd=0.5))
    (0.75, 0.5)
    """
    if reward.clip == "none":
        return 1.0, reward.cost_weight / reward.scale_usd
    return 1.0 - reward.cost_weight, reward.cost_weight / reward.scale_usd
