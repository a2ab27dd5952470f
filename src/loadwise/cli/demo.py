"""`loadwise demo`."""

import argparse
from pathlib import Path

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, put_json, say

DESCRIPTION = (
    "Run one stream of agent programs through a real gateway under several policies: same tasks, same luck. "
    "Emulated models by default; no accelerator, no key."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, which luck, how much."""
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M in llama.cpp (fetches 98 MB once)")
    parser.add_argument(
        "--gguf",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="add a weights file as a real model; repeatable",
    )
    parser.add_argument("--seed", type=int, default=0, help="names tasks and luck (default 0)")
    parser.add_argument("--n", type=int, metavar="N", help="programs per row")
    parser.add_argument("--journal", metavar="DIR", help="where to keep a journal for each row")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the rows, show the table, end with the comparison."""
    gguf = _files(arguments.gguf)
    if arguments.n is not None and arguments.n < 1:
        raise ConfigError(f"--n is {arguments.n}; it must be >= 1")
    try:
        import openai  # noqa: F401  what the demo's agents speak with
    except ModuleNotFoundError as error:
        raise ConfigError("the demo needs openai, which is not installed: pip install 'loadwise[demo]'") from error

    import sys

    from rich.console import Console

    from loadwise.demo.command import demo
    from loadwise.demo.render import LiveView, render_result
    from loadwise.demo.run import to_json
    from loadwise.demo.tasks import generate_tasks
    from loadwise.runner.embed import make_embedder

    talk = Console(stderr=True)
    with LiveView(talk) as view:
        result, journals = demo(
            is_real=arguments.real,
            gguf=gguf,
            seed=arguments.seed,
            n_programs=arguments.n,
            journal_root=None if arguments.journal is None else Path(arguments.journal),
            embedder=make_embedder("hash", 16),
            report=view.update,
        )
    if arguments.json:
        put_json(to_json(result))
    else:
        Console(file=sys.stdout).print(render_result(result))
    program = f"demo-{result.comparison.rows[0].policy}-{generate_tasks(1, arguments.seed)[0].task_id}"
    say(f"journals are in {journals}; for instance: loadwise why {program} --journal {journals / 'loadwise'}")
    return 0


def _files(said: list[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for one in said:
        name, separator, path = one.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"--gguf is {one!r}; it must be NAME=PATH")
        if name in files:
            raise ConfigError(f"--gguf names {name!r} twice")
        if not Path(path).is_file():
            raise ConfigError(f"--gguf {one!r}: there is no file {path!r}")
        files[name] = Path(path)
    return files
