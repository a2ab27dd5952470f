"""`loadwise pack build` and `loadwise pack show`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadwise.kernel.errors import ConfigError

from .lists import split_names
from .output import add_json_flag, columns, put, put_json, say

if TYPE_CHECKING:
    from loadwise.lab.pack import Pack

DESCRIPTION = "Experience packs: what other models or other tasks taught, for a router that has seen nothing yet."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`build` and `show`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="fit a pack to measured outcomes", allow_abbrev=False)
    add = build.add_argument
    add("--outcomes", required=True, metavar="DIR", help="folder with outcomes/ and perhaps tasks/")
    add("--families", metavar="F[,...]", help="families to fit on (default: all of the folder)")
    add("--models", metavar="A[,...]", help="models to fit on (default: all)")
    add("--exclude-models", metavar="A[,...]", help="models to leave out")
    add("--tasks", metavar="FILE", help="fit on these tasks only: FAMILY, a tab, and the id, one a line")
    add("--embedder", default="hash", metavar="KIND", help="of texts: hash (default: words and marks), minilm, none")
    add("--licence", default="unknown", metavar="NAME", help="licence of the outcomes, written into the pack")
    add("--out", default="experience.pack.json", metavar="FILE", help="where to (default experience.pack.json)")
    add_json_flag(build)
    show = actions.add_parser("show", help="say what a pack holds", allow_abbrev=False)
    show.add_argument("pack", metavar="FILE")
    add_json_flag(show)


def run(arguments: argparse.Namespace) -> int:
    """Build or show."""
    from loadwise.lab.pack import read_pack

    if arguments.action == "show":
        pack = read_pack(Path(arguments.pack))
    else:
        pack = _build(arguments)
    if arguments.json:
        put_json(_summary(pack))
    else:
        _show(pack)
    return 0


def _build(arguments: argparse.Namespace) -> "Pack":
    from loadwise.lab.outcomes import read_families, read_outcomes, read_texts
    from loadwise.lab.pack import read_pack, write_pack
    from loadwise.lab.pack_build import BuildConfig, build_pack
    from loadwise.runner.packed import pack_vectors

    folder, out = Path(arguments.outcomes), Path(arguments.out)
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"{str(out)!r} cannot be written: {str(out.resolve().parent)!r} is not a folder")
    if out.is_dir():
        raise ConfigError(f"{str(out)!r} cannot be written: it is a folder")
    vectors, embedder = pack_vectors(arguments.embedder)
    families = _names(arguments.families) or tuple(read_families(folder))
    if not families:
        raise ConfigError(f"outcomes folder {str(folder)!r} holds no run")
    outcomes = read_outcomes(folder, families, None)
    models, excluded = _names(arguments.models) or None, _names(arguments.exclude_models)
    known = set(outcomes.model)
    for model in (*(models or ()), *excluded):
        if model not in known:
            raise ConfigError(f"model {model!r} has no outcome; known: {', '.join(sorted(known))}")
    config = BuildConfig(families, models, excluded, _tasks(arguments.tasks), arguments.licence)
    texts = {} if arguments.embedder == "none" else read_texts(folder, families)
    say(f"fitting {len(outcomes.task_id)} runs of {', '.join(families)}")
    write_pack(build_pack(outcomes, texts, config, vectors, embedder), out)
    say(f"wrote {out}")
    return read_pack(out)


def parse_siblings(text: str | None, what: str = "siblings") -> dict[str, str]:
    """`MODEL=OTHER` parts, separated by commas.

    >>> parse_siblings("new=old, small=tiny")
    {'new': 'old', 'small': 'tiny'}

    Raises:
        ConfigError: a part is not MODEL=OTHER, or a model is named twice.
    """
    found: dict[str, str] = {}
    for part in text.split(",") if text is not None else ():
        model, equals, other = (piece.strip() for piece in part.partition("="))
        if not (model and equals and other) or model in found:
            raise ConfigError(f"{what} {text!r}: {part!r} is not, once each, MODEL=OTHER")
        found[model] = other
    return found


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = split_names(text)
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(f"{text!r} is not a list of different names")
    return names


def _tasks(path: str | None) -> frozenset[tuple[str, str]] | None:
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks {path!r} cannot be read: {error}") from error
    tasks = set()
    for number, line in enumerate(lines, 1):
        family, tab, task_id = line.partition("\t")
        if not (family and tab and task_id):
            raise ConfigError(f"tasks {path!r}, line {number}: {line!r} is not FAMILY, a tab, and an id")
        tasks.add((family, task_id))
    return frozenset(tasks)


def _summary(pack: "Pack") -> Mapping[str, Any]:
    """A pack without its long lists."""
    return {
        "version": pack.version,
        "sha256": pack.digest,
        "licence": pack.licence,
        "embedder": pack.embedder,
        "reads_texts": pack.text is not None,
        "n_runs": pack.provenance.n_runs,
        "n_tasks": pack.provenance.n_tasks,
        "excluded_models": pack.provenance.excluded_models,
        "families": pack.families,
        "n_domains": len(pack.domains),
        "models": pack.models,
    }


def _show(pack: "Pack") -> None:
    text = "reads texts" if pack.text is not None else "reads no texts"
    put(
        f"pack {pack.digest[:12]}: {pack.provenance.n_runs} runs of {pack.provenance.n_tasks} tasks by"
        f" {len(pack.models)} models; {text}; embedder {pack.embedder}; licence {pack.licence}"
    )
    rows = [("model", "family", "tasks", "over a middling model, pp", "USD per unit of cost")]
    for model, abilities in pack.models.items():
        for family, ability in abilities.items():
            usd = "" if ability.cost_usd is None else f"{ability.cost_usd:.4g}"
            rows.append((model, family, str(ability.n_tasks), f"{100.0 * ability.success:+.1f}", usd))
    put(columns(rows))
