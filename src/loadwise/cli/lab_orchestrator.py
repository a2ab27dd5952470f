"""`loadwise lab orchestrator`: a language model as the chooser, beside LinUCB."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from loadwise.kernel.errors import ConfigError

from .lists import split_names, split_numbers
from .output import add_json_flag, columns, put, put_json, say

if TYPE_CHECKING:
    from loadwise.lab.chat import Chat
    from loadwise.lab.orchestrated import Compared

NAME = "orchestrator"
SUMMARY = "a language model chooses the model, beside linucb on the same tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags; those on the stream are the ones of `lab replay`."""
    add = parser.add_argument
    add("--outcomes", required=True, metavar="DIR", help="folder with outcomes/ and tasks/")
    add("--stream", required=True, metavar="FAMILY[,FAMILY...]", help="families whose tasks arrive")
    add("--models", required=True, metavar="A,B[,...]", help="models to choose among")
    add("--agents", metavar="[KEY=]AGENT[,...]", help="agents; KEY is a family, a model, or FAMILY/MODEL")
    add("--url", metavar="URL", help="OpenAI-compatible endpoint that is asked, as http://127.0.0.1:8000/v1")
    add("--ask-model", default="default", metavar="NAME", help="the endpoint's model (default: default)")
    add("--key-env", metavar="VARIABLE", help="variable with the endpoint's key")
    add("--answers", metavar="FILE", help="take answers recorded there instead of asking")
    add("--record", metavar="FILE", help="write the answers there, by the hash of their prompt")
    add("--tasks", type=int, default=100, metavar="N", help="tasks drawn from the stream (default 100)")
    add(
        "--warm",
        type=float,
        default=0.3,
        metavar="RATIO",
        help="share of them probed, not scored (default 0.3)",
    )
    add("--cost-weights", metavar="W[,...]", help="success that a dollar is worth (default 0.1,50)")
    add("--verification", default="adaptive,single", metavar="V[,...]", help="default adaptive,single")
    add("--embedder", default="hash", metavar="KIND", help="of texts: hash (default), minilm")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds for one answer (default 120)")
    add("--seed", type=int, default=0, metavar="N", help="fixes all chance (default 0)")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, compare, report."""
    from loadwise.lab.orchestrated import COST_WEIGHTS_PER_USD, OrchestratorConfig, run_orchestrator
    from loadwise.settings import require_seed

    require_seed(arguments.seed)
    given = arguments.cost_weights
    config = OrchestratorConfig(
        outcomes=arguments.outcomes,
        families=split_names(arguments.stream),
        models=split_names(arguments.models),
        agents=arguments.agents,
        n_tasks=arguments.tasks,
        warm_ratio=arguments.warm,
        cost_weights_per_usd=COST_WEIGHTS_PER_USD if given is None else split_numbers("--cost-weights", given),
        verifications=split_names(arguments.verification),
        embedder=arguments.embedder,
        seed=arguments.seed,
    )
    recorded: dict[str, str] = {}
    ask, chat = _make_ask(arguments, recorded)
    compared = run_orchestrator(config, ask, say)
    if arguments.record is not None:
        Path(arguments.record).write_bytes(msgspec.json.format(msgspec.json.encode(recorded, order="sorted"), indent=1))
    said = _as_json(compared, arguments, chat)
    if arguments.json:
        put_json(said)
    else:
        _show(compared, said)
    return 0


def _make_ask(arguments: argparse.Namespace, recorded: dict[str, str]) -> "tuple[Callable[[str], str], Chat | None]":
    from loadwise.lab.chat import Chat, read_answers, remembering
    from loadwise.policy.orchestrator import Recorded

    if (arguments.url is None) == (arguments.answers is None):
        raise ConfigError("say either --url, where a model answers, or --answers, a file of recorded answers")
    record = arguments.record
    if record is not None and not Path(record).resolve().parent.is_dir():
        raise ConfigError(f"--record {record!r} cannot be written: its folder does not exist")
    if arguments.answers is not None:
        return Recorded(read_answers(arguments.answers)), None
    key = None
    if arguments.key_env is not None:
        key = os.environ.get(arguments.key_env)
        if not key:
            raise ConfigError(f"--key-env: variable {arguments.key_env!r} is not set")
    chat = Chat(arguments.url, arguments.ask_model, key=key, timeout_s=arguments.timeout)
    return remembering(chat, recorded), chat


def _as_json(compared: "Compared", arguments: argparse.Namespace, chat: "Chat | None") -> dict[str, Any]:
    from loadwise import __version__
    from loadwise.lab.orchestrated import as_values
    from loadwise.lab.report import commit, machine

    values, ci95 = as_values(compared.rows)
    config = {name: getattr(compared.config, name) for name in compared.config.__struct_fields__ if name != "outcomes"}
    config |= {name: getattr(compared, name) for name in ("scored_ids_sha256", "probed_ids_sha256")}
    if chat is None:
        config["answers"] = "recorded"
    else:
        config |= {"ask_model": chat.model, "answers": "emulated" if chat.is_emulated() else "model"}
        values |= _costs_of_asking(chat)
    # What an emulator says is no decision: such a run shows that the pipes hold, and nothing else.
    readings = {"emulated": "plumbing, not result", "recorded": "a recorded run again, worth what that was"}
    config["reading"] = readings.get(str(config["answers"]), "result of this model")
    return {
        "name": f"lab.{NAME}",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": [compared.config.seed],
        "config": config,
        "values": values,
        "ci95": ci95,
        "peers": {},
        "checks": [],
        "rows": [{**row._asdict(), "ci95": list(row.ci95)} for row in compared.rows],
        "n_tasks": compared.n_scored,
        "dropped": dict(compared.stream.dropped),
    }


def _costs_of_asking(chat: "Chat") -> dict[str, float]:
    """Medians over the questions asked."""
    found = {"asked": float(len(chat.asked))}
    columns_by_name: dict[str, list[float]] = {
        "decision_p50_ms": [1e3 * one.seconds for one in chat.asked],
        "prompt_tokens_p50": [one.prompt_tokens for one in chat.asked if one.prompt_tokens is not None],
        "completion_tokens_p50": [one.completion_tokens for one in chat.asked if one.completion_tokens is not None],
    }
    for name, column in columns_by_name.items():
        if column:
            found[name] = float(np.median(column))
    return {f"{NAME}.{name}": value for name, value in found.items()}


def _show(compared: "Compared", said: dict[str, Any]) -> None:
    put(f"{compared.n_scored} scored tasks; answers: {said['config']['answers']} ({said['config']['reading']})")
    rows: list[tuple[str, ...]] = [
        ("chooser", "verifier", "start", "per USD", "success", "USD/task", "over hull, pp", "choose, ms", "unparsed")
    ]
    for row in compared.rows:
        low, high = row.ci95
        gain = f"{row.hull_gain_pp:+.1f} [{low:+.1f}, {high:+.1f}]"
        found = (f"{row.cost_weight_per_usd:g}", f"{row.success:.3f}", f"{row.cost_usd:.4f}", gain)
        rows.append((row.policy, row.verification, row.start, *found, f"{row.choose_p50_ms:.2f}", str(row.n_unparsed)))
    put(columns(rows))
    for name, value in said["values"].items():
        if name.startswith(f"{NAME}.") and name.count(".") == 1:
            put(f"{name} {value:g}")
