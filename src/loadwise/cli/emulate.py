"""`loadwise emulate`."""

import argparse
import math

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, put, put_json, say

DESCRIPTION = "Run emulated engines behind HTTP, in real or scaled time, until interrupted."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which engines, where, how fast."""
    parser.add_argument("--model", dest="models", action="append", default=[], metavar="NAME", help="one backend each")
    parser.add_argument("--scenario", metavar="SCENARIO.yaml", help="emulate this scenario's engines instead")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="of the first backend, others follow; 0 for free ones")
    parser.add_argument("--scale", type=float, default=1.0, help="engine seconds per real second (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="fixes lengths and words (default 0)")
    parser.add_argument("--output-tokens", type=float, metavar="N", help="tokens of each answer")
    parser.add_argument("--fault-header", action="store_true", help="let a request name its fault: x-emulator-fault")
    parser.add_argument("--stepped", action="store_true", help="time stands still until POST /emulator/step moves it")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of the engine: slots=4"
    )
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Emulate until SIGINT or SIGTERM."""
    import asyncio
    import signal

    import uvloop

    from loadwise.emulator.emulator import EmulatorHandle
    from loadwise.emulator.main import EmulateOptions, emulate
    from loadwise.settings import convert
    from loadwise.sim.simple_engine import SimpleEngineSpec

    from .pool import apply_setting

    if arguments.output_tokens is not None and not (math.isfinite(arguments.output_tokens)):
        raise ConfigError(f"--output-tokens is {arguments.output_tokens!r}; it must be finite")
    engine: dict[str, object] = {}
    for setting in arguments.settings:
        apply_setting(engine, setting)
    options = EmulateOptions(
        models=tuple(arguments.models),
        scenario=arguments.scenario,
        host=arguments.host,
        port=arguments.port,
        scale=arguments.scale,
        seed=arguments.seed,
        engine=convert(engine, SimpleEngineSpec, where="--set"),
        output_tokens=arguments.output_tokens,
        has_fault_header=arguments.fault_header,
        is_stepped=arguments.stepped,
    )

    def is_ready(handle: EmulatorHandle) -> None:
        if arguments.json:
            put_json({"urls": handle.urls})
        else:
            for name, url in handle.urls.items():
                put(f"{name} {url}")
        say("emulating; interrupt to stop")

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await emulate(options, is_ready, stop)

    uvloop.run(serve())
    return 0
