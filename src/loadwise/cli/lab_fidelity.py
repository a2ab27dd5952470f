"""`loadwise lab fidelity`: the simulator beside papers, public measurements and queueing theory."""

import argparse

from .output import add_json_flag, columns, put, put_json, say

SUMMARY = "compare the simulator with papers, public measurements and queueing theory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many seeds."""
    seeds = "seeds that figures of papers are averaged over (default 3)"
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help=seeds)
    parser.add_argument("--quick", action="store_true", help="one seed; done within a minute")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run everything and print paper, ours and band. A missed band is shown and is no failure of the command."""
    from loadwise.lab.fidelity import fidelity_json, fidelity_rows, run_fidelity

    n_seeds = 1 if arguments.quick else arguments.seeds
    rows = run_fidelity(n_seeds)
    if arguments.json:
        put_json(fidelity_json(rows, n_seeds))
    else:
        put(columns(fidelity_rows(rows)))
    missed = [row.key for row in rows if not row.holds]
    say(
        f"{len(rows) - len(missed)} of {len(rows)} figures lie in their bands"
        + "".join(f"; missed {key}" for key in missed)
    )
    return 0
