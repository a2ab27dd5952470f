"""`loadwise serve POOL.yaml`."""

import argparse
import gc
import json
import os

# A learner's matrices are small: BLAS threads would only contend with the loop. Must be said before numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from .output import add_json_flag, put_json, say
from .pool import add_pool_arguments, read_pool

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
    parser.add_argument("--seed", type=int, help="fixes all chance of the router (gateway.seed)")
    add_json_flag(parser)


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """The flags as settings of the pool file; they win over `--set`."""
    settings = list(arguments.settings)
    for name in ("host", "port", "journal", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            settings.append(f"gateway.{name}={json.dumps(value)}")  # JSON is YAML, so no path is taken for a number
    if arguments.no_journal:
        settings.append("gateway.journal=null")
    return settings


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    config = read_pool(arguments.pool, settings_of(arguments))

    import asyncio
    import signal

    import uvloop

    from loadwise.gateway.reading import embedder_of, reading_notices
    from loadwise.gateway.serve import gateway_config, start

    gateway = gateway_config(config)
    embedder = embedder_of(config, gateway)
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
