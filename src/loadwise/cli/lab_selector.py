"""`loadwise lab selector`: how well task types are told from the texts of real tasks."""

import argparse
from pathlib import Path

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, columns, put, put_json, say

SUMMARY = "tell the task types of real requests from a few examples of each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags."""
    add = parser.add_argument
    add("--tasks", required=True, metavar="DIR", help="folder of parquet files, or one with tasks/")
    add("--classes", metavar="NAME[=FAMILY+...][,...]", help="task types and their families (default: the known ones)")
    add("--embedder", default="minilm", metavar="KIND", help="minilm (default), hash (words alone) or openai")
    add("--url", metavar="URL", help="with openai: the server, as http://127.0.0.1:7997/v1")
    add("--model", metavar="NAME", help="with openai: its model, as bge-m3")
    add("--key-env", metavar="VARIABLE", help="with openai: variable with the key")
    add("--k", default="1,5,10,20", metavar="K[,...]", help="examples of each class (default 1,5,10,20)")
    add("--draws", type=int, default=200, metavar="N", help="random draws of the examples (default 200)")
    add("--texts", type=int, default=600, metavar="N", help="at most so many texts of a class (default 600)")
    add("--half", default="all", metavar="HALF", help="first, second or all (default) of the texts, by their hash")
    add("--margin", type=float, metavar="X", help="below it nothing is told (default: the gateway's)")
    add("--seed", type=int, default=0, metavar="N", help="fixes all chance (default 0)")
    add("--markdown", metavar="FILE", help="write tables there")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write, report."""
    from loadwise.lab.selector import SelectorConfig, run_selector
    from loadwise.lab.selector_report import as_json, as_markdown, as_rows
    from loadwise.runner.embed import KINDS, EmbedderSpec
    from loadwise.settings import require_seed

    require_seed(arguments.seed)
    if arguments.embedder not in KINDS:
        raise ConfigError(f"embedder {arguments.embedder!r} is unknown; known: {', '.join(KINDS)}")
    if arguments.markdown is not None and not Path(arguments.markdown).resolve().parent.is_dir():
        raise ConfigError(f"{arguments.markdown!r} cannot be written: its folder does not exist")
    given = {} if arguments.margin is None else {"margin": arguments.margin}
    config = SelectorConfig(
        tasks=arguments.tasks,
        classes=None if arguments.classes is None else parse_classes(arguments.classes),
        embedder=EmbedderSpec(
            kind=arguments.embedder,
            url=arguments.url,
            model=arguments.model,
            key_env=arguments.key_env,
            timeout_s=60.0,
        ),
        k=_numbers(arguments.k),
        n_draws=arguments.draws,
        n_texts=arguments.texts,
        half=arguments.half,
        seed=arguments.seed,
        **given,
    )
    found = run_selector(config, say)
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text(as_markdown(found), encoding="utf-8")
    if arguments.json:
        put_json(as_json(found))
        return 0
    put(columns(as_rows(found)))
    for check in found.checks:
        put(f"{'holds' if check['holds'] else 'missed'}  {check['key']} {check['op']} {check['bound']}")
    return 0


def parse_classes(text: str) -> dict[str, tuple[str, ...]]:
    """`swe,terminal=terminal1+terminal2` as families by class.

    >>> parse_classes("swe,terminal=terminal1+terminal2")
    {'swe': ('swe',), 'terminal': ('terminal1', 'terminal2')}

    Raises:
        ConfigError: a part is empty, or a class or family is named twice.
    """
    classes: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, equals, members = (piece.strip() for piece in part.partition("="))
        families = tuple(one.strip() for one in members.split("+")) if equals else (name,)
        taken = {one for of in classes.values() for one in of}
        if not name or "" in families or name in classes or len(set(families)) < len(families) or taken & {*families}:
            raise ConfigError(f"classes {text!r}: {part.strip()!r} is not, once each, NAME or NAME=FAMILY+FAMILY")
        classes[name] = families
    if len(classes) < 2:
        raise ConfigError(f"classes {text!r} name one class; a type is told from another")
    return classes


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--k is {text!r}; it must be whole numbers separated by commas") from error
