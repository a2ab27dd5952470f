"""What a start has to tell its operator, and what it makes of its surroundings."""

import resource
from collections.abc import Callable

from loadwise.kernel.pool import Price
from loadwise.router.machine import Router
from loadwise.settings import Config

from .config import GatewayConfig
from .guard import is_loopback

OTHER_FILES = 256
"""Open files besides connections: journal, index, libraries."""


def notices(config: Config, gateway: GatewayConfig, *, has_keys: bool) -> list[str]:
    """What is configured and does not do what one might think; raises the limit of open files on the way."""
    said = []
    if not has_keys and not is_loopback(gateway.host):
        said.append(
            f"listening on {gateway.host} without API keys: whoever reaches it may use every model, "
            "report verdicts and see all programs (gateway.key_env)"
        )
    free = [name for name, model in config.models.items() if model.usd_per_million == Price()]
    if config.router.budget_usd_per_h is not None and free:
        said.append(
            f"router.budget_usd_per_h is {config.router.budget_usd_per_h:g} and does not hold for "
            f"{', '.join(free)}: no usd_per_million, so they cost nothing"
        )
    wanted = gateway.connections_max + len(config.backends) * (gateway.upstream_connections_max + 2) + OTHER_FILES
    n_files = raise_file_limit(wanted)
    if n_files < gateway.connections_max + OTHER_FILES:
        said.append(
            f"{n_files} files may be open here; gateway.connections_max is {gateway.connections_max} "
            f"and would need {wanted} (ulimit -n)"
        )
    return said


def alarm_notice(router: Router, say: Callable[[str], None]) -> Callable[[float], None]:
    """What says, as often as it is called, which models have counted as changed since."""
    known = router.credit.alarms()

    def tell(now_s: float) -> None:
        alarms = router.credit.alarms()
        for model, n in alarms.items():
            if n > known.get(model, 0):
                say(f"policy {router.config.policy.name!r}: model {model!r} is no longer what it was; learned anew")
        known.update(alarms)

    return tell


def raise_file_limit(wanted: int) -> int:
    """Let this process open more files where the system allows it; returns how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = wanted if soft == resource.RLIM_INFINITY else soft
    goal = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if goal <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):
        return soft
    return goal
