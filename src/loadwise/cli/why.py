"""`loadwise why PROGRAM`."""

import argparse

from .journal import DEFAULT_JOURNAL, add_import_flag
from .output import add_json_flag, put, put_json

DESCRIPTION = "Say why a program ran where it ran: candidates, scores, signals with their ages, propensity, verdict."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The program, and the journal that knows it."""
    parser.add_argument("program", metavar="PROGRAM", help="a program's id")
    parser.add_argument(
        "--journal", metavar="PATH", default=DEFAULT_JOURNAL, help=f"the gateway's journal (default {DEFAULT_JOURNAL})"
    )
    add_import_flag(parser)
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain."""
    from loadwise.journal.explain import why
    from loadwise.journal.explanation_text import render_why

    from .journal import existing, machine_maker

    explanation = why(existing(arguments.journal), arguments.program, machine_maker(arguments))
    if arguments.json:
        put_json(explanation)
    else:
        put(render_why(explanation))
    return 0
