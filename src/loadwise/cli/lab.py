"""`loadwise lab NAME`: experiments on measured outcomes, and on simulated load."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadwise.kernel.errors import ConfigError

from .lists import split_names, split_numbers
from .output import add_json_flag, columns, put, put_json, say
from .pack import parse_siblings

if TYPE_CHECKING:
    from loadwise.lab.experiment import ReplayConfig, Result

QUICK_PASSES, QUICK_DRAWS = 2, 200
"""What `--quick` does at most, whatever else is asked for."""

PLOTS = (".png", ".svg", ".pdf")

EXPERIMENTS = {
    "replay": ("replay measured outcomes through the policies of the stack: success against cost", 8),
    "cold": ("the same over tasks that come once, from the first one on", 1),
}
"""Replays: what each does, and its default number of passes."""

OTHERS = {
    "disc": "loadwise.cli.lab_disc",
    "fidelity": "loadwise.cli.lab_fidelity",
    "mismatch": "loadwise.cli.lab_mismatch",
    "orchestrator": "loadwise.cli.lab_orchestrator",
    "selector": "loadwise.cli.lab_selector",
    "sweep": "loadwise.cli.lab_sweep",
}
"""Experiments with a module of their own, which has `SUMMARY`, `add_arguments(parser)` and `run(arguments)`."""

DESCRIPTION = "Experiments on measured outcomes and simulated load."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser for each of `EXPERIMENTS` and `OTHERS`."""
    experiments = parser.add_subparsers(dest="experiment", metavar="NAME", required=True)
    for name, (summary, n_passes) in EXPERIMENTS.items():
        one = experiments.add_parser(name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
        _add_stream(one)
        _add_feedback(one)
        passes = f"passes over the tasks, the last is scored (default {n_passes})"
        one.add_argument("--passes", type=int, default=n_passes, metavar="N", help=passes)
        quick = f"one order, at most {QUICK_PASSES} passes, {QUICK_DRAWS} draws: a look, no figure"
        one.add_argument("--quick", action="store_true", help=quick)
        one.add_argument("--markdown", metavar="FILE", help="write tables there")
        one.add_argument("--plot", metavar="FILE", help="draw success against cost there (.png, .svg, .pdf)")
        add_json_flag(one)
    for name, path in OTHERS.items():
        module = import_module(path)
        one = experiments.add_parser(
            name, help=module.SUMMARY, description=f"{module.SUMMARY.capitalize()}.", allow_abbrev=False
        )
        module.add_arguments(one)


def _add_stream(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--outcomes", required=True, metavar="DIR", help="folder with outcomes/ and perhaps tasks/")
    add("--stream", required=True, metavar="FAMILY[,FAMILY...]", help="families whose tasks arrive")
    add("--models", required=True, metavar="A,B[,...]", help="models to choose among")
    add("--agents", metavar="[KEY=]AGENT[,...]", help="agents; KEY is a family, a model, or FAMILY/MODEL")
    add("--policies", metavar="P[,...]", help="policies, presets or package.module:Class (default: all policies)")
    add("--orders", type=int, default=20, metavar="N", help="seeded orders of the tasks (default 20)")
    add("--cost-weights", metavar="A[,...]", help="prices of cost in the reward (default 0 to 3 in nine steps)")
    add("--pack", metavar="FILE[,FILE]", help="experience packs: each task is scored with the first not fitted on it")
    add("--siblings", metavar="MODEL=OTHER[,...]", help="models of the pack that stand for models new to it")
    named = "construct family tau2 from DIR/tau2_marginals.parquet: which submission stands for which model"
    add("--submissions", metavar="MODEL=SUBMISSION[,...]", help=named)
    kinds = "how constructed outcomes of two models go together (default: all three, one after the other)"
    add("--coupling", metavar="KIND[,KIND...]", help=kinds)
    add("--embedder", default="hash", metavar="KIND", help="of texts: hash (default), minilm, none")
    add("--draws", type=int, default=2000, metavar="N", help="bootstrap draws (default 2000)")
    add("--seed", type=int, default=0, metavar="N", help="fixes all chance (default 0)")


def _add_feedback(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--verification", default="adaptive", metavar="V[,...]", help="adaptive (default), single, best; or several")
    add(
        "--misclassified", type=float, metavar="RATIO", help="how often the wrong verifier is taken (default: ORACLE's)"
    )
    add("--delay", type=int, default=0, metavar="N", help="a verdict lands N decisions later (default 0)")
    add("--concurrency", default="sequential", metavar="KIND", help="sequential (default), delayed, batch, slots")
    add("--in-flight", type=int, default=1, metavar="C", help="programs in flight (default 1)")
    add("--loss", type=float, default=0.0, metavar="RATIO", help="share of verdicts that never land (default 0)")


def run(arguments: argparse.Namespace) -> int:
    """Run one experiment."""
    if arguments.experiment in OTHERS:
        status: int = import_module(OTHERS[arguments.experiment]).run(arguments)
        return status
    return _replay(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    """Replay, write the files asked for, report."""
    from loadwise.lab.experiment import run_replay
    from loadwise.lab.report import as_json
    from loadwise.settings import require_seed

    require_seed(arguments.seed)
    if arguments.quick:
        arguments.orders = min(arguments.orders, 1)
        arguments.passes = min(arguments.passes, QUICK_PASSES)
        arguments.draws = min(arguments.draws, QUICK_DRAWS)
    for path in (arguments.markdown, arguments.plot):
        _require_place(path)
    if arguments.plot is not None and Path(arguments.plot).suffix not in PLOTS:
        raise ConfigError(f"--plot is {arguments.plot!r}; it must end in one of {', '.join(PLOTS)}")
    config = _config(arguments)
    results = [run_replay(one, say) for one in _coupled(config, arguments)]
    _write(results, arguments.markdown, arguments.plot)
    if arguments.json:
        told = [as_json(result, arguments.experiment) for result in results]
        couplings = {result.config.coupling: one for result, one in zip(results, told, strict=True)}
        put_json({**told[0], "couplings": couplings} if config.submissions else told[0])
    else:
        for result in results:
            _show(result)
    return 0


def _config(arguments: argparse.Namespace) -> "ReplayConfig":
    from loadwise.lab.experiment import COST_WEIGHTS, ReplayConfig
    from loadwise.lab.feedback import FeedbackSpec

    weights = arguments.cost_weights
    return ReplayConfig(
        outcomes=arguments.outcomes,
        families=split_names(arguments.stream),
        models=split_names(arguments.models),
        agents=arguments.agents,
        policies=None if arguments.policies is None else split_names(arguments.policies),
        n_passes=arguments.passes,
        n_orders=arguments.orders,
        cost_weights=COST_WEIGHTS if weights is None else split_numbers("--cost-weights", weights),
        verifications=split_names(arguments.verification),
        feedback=FeedbackSpec(
            misclassified=arguments.misclassified,
            concurrency=arguments.concurrency,
            in_flight=arguments.in_flight,
            delay=arguments.delay,
            loss=arguments.loss,
        ),
        packs=() if arguments.pack is None else split_names(arguments.pack),
        siblings=parse_siblings(arguments.siblings),
        submissions=parse_siblings(arguments.submissions, "--submissions"),
        embedder=arguments.embedder,
        n_draws=arguments.draws,
        seed=arguments.seed,
    )


def _coupled(config: "ReplayConfig", arguments: argparse.Namespace) -> "list[ReplayConfig]":
    """The replay asked for, or one for each coupling of what is constructed."""
    from loadwise.lab.coupled import COUPLINGS

    if not config.submissions:
        if arguments.coupling is not None:
            raise ConfigError(f"--coupling is {arguments.coupling!r}, but no --submissions say what is constructed")
        return [config]
    kinds = COUPLINGS if arguments.coupling is None else split_names(arguments.coupling)
    if len(set(kinds)) != len(kinds):
        raise ConfigError(f"--coupling is {arguments.coupling!r}; each may be given once")
    return [msgspec.structs.replace(config, coupling=kind) for kind in kinds]


def _require_place(path: str | None) -> None:
    """A wrong path ends the command before the replay, not after it."""
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"{path!r} cannot be written: {str(Path(path).resolve().parent)!r} is not a folder")
    if Path(path).is_dir():
        raise ConfigError(f"{path!r} cannot be written: it is a folder")


def _write(results: "Sequence[Result]", markdown: str | None, plot: str | None) -> None:
    """Every table in one file; the picture is of the first."""
    from loadwise.lab.report import as_markdown, write_plot

    if markdown is not None:
        Path(markdown).write_text("\n".join(map(as_markdown, results)), encoding="utf-8")
    if plot is not None:
        write_plot(results[0], plot)


def _show(result: "Result") -> None:
    from loadwise.lab.report import as_rows

    if result.config.submissions:
        put(f"tau2 is constructed, not measured: {result.config.coupling}")
    points, figures = as_rows(result)
    put(columns(points))
    put("")
    put(columns(figures))
