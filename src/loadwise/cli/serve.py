"""`loadwise serve POOL.yaml`."""

import argparse
import gc
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

# A learner's matrices are small: BLAS threads would only contend with the loop. Must be said before numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from .output import add_json_flag, put_json, say
from .pack import parse_siblings
from .pool import add_pool_arguments, read_pool

if TYPE_CHECKING:
    from loadwise.gateway.config import GatewayConfig
    from loadwise.runner.embed import Embedder
    from loadwise.settings import Config

GC_THRESHOLD = 50_000
"""Objects made between two young collections; a turn makes about a hundred and leaves no cycle behind."""
DESCRIPTION = "Run the gateway for a pool file until interrupted."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pool file, and what is often set by hand."""
    add_pool_arguments(parser)
    parser.add_argument("--host", help="address to listen on (gateway.host)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any free one (gateway.port)")
    parser.add_argument("--journal", metavar="DIR", help="where to remember (gateway.journal)")
    parser.add_argument("--no-journal", action="store_true", help="remember nothing")
    parser.add_argument("--pack", metavar="FILE", help="experience pack to begin with (gateway.pack)")
    siblings = "models of the pack that stand for models new to it (gateway.siblings)"
    parser.add_argument("--siblings", metavar="MODEL=OTHER[,...]", help=siblings)
    parser.add_argument("--seed", type=int, help="fixes all chance of the router (gateway.seed)")
    add_json_flag(parser)


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """The flags as settings of the pool file; they win over `--set`."""
    settings = list(arguments.settings)
    for name in ("host", "port", "journal", "pack", "siblings", "seed"):
        value = getattr(arguments, name)
        if name == "siblings" and value is not None:
            value = parse_siblings(value)
        if value is not None:
            settings.append(f"gateway.{name}={json.dumps(value)}")  # JSON is YAML, so no path is taken for a number
    if arguments.no_journal:
        settings.append("gateway.journal=null")
    return settings


def _embedder_of(config: "Config", gateway: "GatewayConfig") -> "tuple[Config, Embedder | None]":
    """What reads first requests, with the pack where there is one, and the configuration that fits it."""
    if gateway.pack is not None:
        from loadwise.lab.pack import read_pack
        from loadwise.lab.pack_serve import with_pack

        begun = with_pack(config, gateway)
        pack = read_pack(Path(gateway.pack))
        new = [name for name in config.models if name not in pack.models]
        told = f"; new to it: {', '.join(new)}, taken as their siblings" if new else ""
        say(f"beginning with experience pack {pack.digest[:12]}{told}")

        return begun
    from loadwise.gateway.reading import embedder_of

    return config, embedder_of(config, gateway)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    config = read_pool(arguments.pool, settings_of(arguments))

    import asyncio
    import signal

    import uvloop

    from loadwise.gateway.reading import reading_notices
    from loadwise.gateway.serve import gateway_config, start

    gateway = gateway_config(config)
    config, embedder = _embedder_of(config, gateway)
    for notice in reading_notices(config, gateway, embedder):
        say(notice)

    async def serve() -> None:
        running = await start(config, gateway, embedder=embedder, say=say)
        # What has been loaded stays: the collector need not walk it again and again between two requests.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        say(f"serving {', '.join(config.models)} on {running.url}/v1")
        if arguments.json:
            put_json({"url": f"{running.url}/v1", "models": list(config.models), "journal": gateway.journal})
        await stop.wait()
        say("stopping")
        await running.close()

    try:
        uvloop.run(serve())
    finally:
        if embedder is not None:
            embedder.close()
    return 0
