"""`loadwise whatif JOURNAL --policy P`: what another policy would have earned on the same programs."""

import argparse

from .journal import existing
from .output import add_json_flag, columns, put, put_json, say

DESCRIPTION = "Estimate what another policy would have earned on the programs of a journal (IPS, SNIPS, doubly robust)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A journal, a policy, and how much of the journal a learning policy learns from."""
    add = parser.add_argument
    add("journal", metavar="JOURNAL", help="directory or file")
    policy = "a policy or preset, fixed:MODEL, NAME?KEY=VALUE, JSON with a name and options, or package.module:Class"
    add("--policy", required=True, metavar="P", help=policy)
    share = "share of the journal that a learning policy learns from before it is frozen and evaluated (default 0.5)"
    add("--learn-share", type=float, default=0.5, metavar="RATIO", help=share)
    add("--seed", type=int, default=0, metavar="N", help="of the chance of the policy in question (default 0)")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Estimate and report; a refusal is an error (status 1)."""
    from loadwise.lab.whatif import as_json, as_notes, as_rows, what_if
    from loadwise.settings import require_seed

    require_seed(arguments.seed)
    path = existing(arguments.journal)
    found = what_if(path, arguments.policy, learn_ratio=arguments.learn_share, seed=arguments.seed)
    if arguments.json:
        put_json(as_json(found))
        return 0
    for note in as_notes(found):
        say(note)
    put(columns(as_rows(found)))
    return 0
