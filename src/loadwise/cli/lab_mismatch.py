"""`loadwise lab mismatch`: one verifier for all, the adaptive choice, and the best fixed one, on measured outcomes."""

import argparse
from pathlib import Path

from loadwise.kernel.errors import ConfigError

from .lists import split_names, split_numbers
from .output import add_json_flag, columns, put, put_json, say

SUMMARY = "what a learner gains under one verifier, the adaptive choice and the best fixed one"
PLOTS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags; those on the stream are the ones of `lab replay`."""
    add = parser.add_argument
    add("--outcomes", required=True, metavar="DIR", help="folder with outcomes/ and perhaps tasks/")
    add("--stream", required=True, metavar="FAMILY[,FAMILY...]", help="families of the mixed stream")
    add("--models", required=True, metavar="A,B[,...]", help="models to choose among")
    add("--agents", metavar="[KEY=]AGENT[,...]", help="agents; KEY is a family, a model, or FAMILY/MODEL")
    add("--policy", default="linucb", metavar="P", help="the learner (default linucb)")
    add("--passes", type=int, default=8, metavar="N", help="passes over the tasks, the last is scored (default 8)")
    add("--orders", type=int, default=20, metavar="N", help="seeded orders of the tasks for each seed (default 20)")
    add("--cost-weights", metavar="A[,...]", help="prices of cost for the mixed stream (default 0 to 3 in nine steps)")
    add("--selector", metavar="FILE", help="result of `lab selector --json`: how often the wrong verifier is taken")
    add("--misclassified", type=float, metavar="RATIO", help="the same for every family, instead")
    add("--embedder", default="hash", metavar="KIND", help="of texts: hash (default), minilm, none")
    add("--draws", type=int, default=2000, metavar="N", help="bootstrap draws (default 2000)")
    add("--seeds", default="0,1,2", metavar="N[,...]", help="each fixes all chance of its orders (default 0,1,2)")
    add("--markdown", metavar="FILE", help="write tables there")
    add("--plot", metavar="FILE", help="draw ORACLE's Fig. 2a, 8a and 8b there (.png, .svg, .pdf)")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, write, report."""
    from loadwise.lab.experiment import COST_WEIGHTS
    from loadwise.lab.mismatch import MismatchConfig, read_selector, run_mismatch
    from loadwise.lab.mismatch_report import as_json, as_markdown, as_rows, write_plot
    from loadwise.settings import require_seed

    for path in (arguments.markdown, arguments.plot):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"{path!r} cannot be written: its folder does not exist")
    if arguments.plot is not None and Path(arguments.plot).suffix not in PLOTS:
        raise ConfigError(f"--plot is {arguments.plot!r}; it must end in one of {', '.join(PLOTS)}")
    families = split_names(arguments.stream)
    wrong: dict[str, float] = {}
    if arguments.selector is not None:
        wrong = read_selector(arguments.selector, families)
    if arguments.misclassified is not None:
        wrong = dict.fromkeys(families, arguments.misclassified)
    seeds = tuple(int(seed) for seed in split_numbers("--seeds", arguments.seeds))
    for seed in seeds:
        require_seed(seed)
    given = arguments.cost_weights
    found = run_mismatch(
        MismatchConfig(
            outcomes=arguments.outcomes,
            families=families,
            models=split_names(arguments.models),
            agents=arguments.agents,
            policy=arguments.policy,
            n_passes=arguments.passes,
            n_orders=arguments.orders,
            cost_weights=COST_WEIGHTS if given is None else split_numbers("--cost-weights", given),
            seeds=seeds,
            misclassified=wrong,
            embedder=arguments.embedder,
            n_draws=arguments.draws,
        ),
        say,
    )
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text(as_markdown(found), encoding="utf-8")
    if arguments.plot is not None:
        write_plot(found, arguments.plot)
    if arguments.json:
        put_json(as_json(found))
        return 0
    put(columns(as_rows(found)))
    for check in found.checks:
        put(f"{'holds' if check['holds'] else 'missed'}  {check['key']} {check['op']} {check['bound']}")
    return 0
