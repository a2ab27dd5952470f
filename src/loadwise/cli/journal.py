"""`loadwise journal story|replay|verify|cat|audit`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loadwise.kernel.errors import ConfigError

from .output import add_json_flag, columns, plain, put, put_json

if TYPE_CHECKING:
    from loadwise.journal.regenerate import MakeMachine

DESCRIPTION = "Read a journal."
DEFAULT_JOURNAL = "loadwise-journal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One verb each."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    story = verbs.add_parser("story", help="one program's life, or which programs there are")
    story.add_argument("names", nargs="*", metavar="[JOURNAL] [PROGRAM]", help="the journal, the program, or both")
    story.add_argument("--journal", metavar="PATH", help=f"the journal (default {DEFAULT_JOURNAL})")
    for verb, summary in (
        ("replay", "let a machine answer the recorded events again: the same commands must come"),
        ("verify", "check every frame, sequence and snapshot"),
        ("cat", "print it as JSON, one line an entry"),
        ("audit", "how often verifiers are wrong, from programs that a person has judged as well"),
    ):
        verbs.add_parser(verb, help=summary).add_argument("journal", metavar="JOURNAL", help="directory or file")
    for verb in ("story", "replay"):
        add_import_flag(verbs.choices[verb])
    for verb_parser in verbs.choices.values():
        add_json_flag(verb_parser)


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """A journal may name a policy class outside loadwise; importing it runs whatever is there."""
    parser.add_argument(
        "--allow-import",
        action="store_true",
        help="import the policy class that the journal names, which runs its code; for journals of your own",
    )


def machine_maker(arguments: argparse.Namespace) -> "MakeMachine":
    """How machines are made from the journal's headers."""
    from loadwise.journal.regenerate import importing_machine, recorded_machine

    return importing_machine if arguments.allow_import else recorded_machine


def run(arguments: argparse.Namespace) -> int:
    """Do what the verb says."""
    run_verb: dict[str, Callable[[argparse.Namespace], int]] = {
        "story": _story,
        "replay": _replay,
        "verify": _verify,
        "cat": _cat,
        "audit": _audit,
    }
    return run_verb[arguments.verb](arguments)


def existing(path: str) -> Path:
    """A journal that is there.

    Raises:
        ConfigError: nothing is, or what is there is no journal.
    """
    from loadwise.journal.files import list_segments

    if not Path(path).exists():
        raise ConfigError(f"journal {path!r} does not exist")
    if not list_segments(Path(path)):
        raise ConfigError(f"journal {path!r} holds no segment")
    return Path(path)


def _story(arguments: argparse.Namespace) -> int:
    from loadwise.journal.story import render_story, story

    journal, program_id = _journal_and_program(arguments)
    if program_id is None:
        return _programs(journal, as_json=arguments.json)
    lines = story(journal, program_id, machine_maker(arguments))
    if arguments.json:
        put_json({"program": program_id, "lines": lines})
    else:
        put(render_story(lines))
    return 0


def _journal_and_program(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    """Two names are a journal and a program; one is a journal where there is one, else a program."""
    names: list[str] = arguments.names
    if len(names) > 2 or (len(names) == 2 and arguments.journal is not None):
        raise ConfigError(f"story takes a journal and a program, not {len(names)} names")
    if len(names) == 2:
        return existing(names[0]), names[1]
    if arguments.journal is None and len(names) == 1 and Path(names[0]).exists():
        return existing(names[0]), None
    return existing(arguments.journal or DEFAULT_JOURNAL), names[0] if names else None


def _programs(journal: Path, *, as_json: bool) -> int:
    """Which programs a journal tells of."""
    from loadwise.journal.reader import read
    from loadwise.kernel.events import TurnArrived

    arrived_at_s: dict[str, float] = {}
    n_turns: dict[str, int] = {}
    for entry in read(journal):
        if isinstance(entry.event, TurnArrived):
            arrived_at_s.setdefault(entry.event.program_id, entry.event.at_s)
            n_turns[entry.event.program_id] = n_turns.get(entry.event.program_id, 0) + 1
    if as_json:
        programs = [{"program": p, "arrived_at_s": at_s, "n_turns": n_turns[p]} for p, at_s in arrived_at_s.items()]
        put_json({"programs": programs})
    elif arrived_at_s:
        put(columns([(f"{at_s:12.6f} s", f"{n_turns[p]} turns", p) for p, at_s in arrived_at_s.items()]))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from loadwise.journal.parity import replay

    report = replay(existing(arguments.journal), machine_maker(arguments))
    if arguments.json:
        put_json({"holds": report.holds, **plain(report)})
    elif report.mismatch is not None:
        put(f"differs at {report.mismatch}")
    else:
        put(
            f"same commands: {report.n_entries} entries, {report.n_commands} commands, {report.n_decisions} decisions, "
            f"scores to {report.worst_score_difference:.3g}"
        )
    return 0 if report.holds else 1


def _verify(arguments: argparse.Namespace) -> int:
    from loadwise.journal.verify import verify

    integrity = verify(existing(arguments.journal))
    if arguments.json:
        put_json({"is_whole": integrity.is_whole, **plain(integrity)})
    else:
        rows = [(name, str(value)) for name, value in plain(integrity).items() if name != "problems"]
        put(columns([*rows, *(("problem", str(problem)) for problem in integrity.problems)]))
        put("whole" if integrity.is_whole else "damaged")
    return 0 if integrity.is_whole else 1


def _cat(arguments: argparse.Namespace) -> int:
    from loadwise.journal.verify import cat

    for line in cat(existing(arguments.journal)):
        print(line)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from loadwise.journal.audit import audit

    found = audit(existing(arguments.journal))
    if arguments.json:
        put_json({"verifiers": [plain(one) for one in found]})
        return 0
    rows: list[tuple[str, ...]] = [
        ("task type", "verifier", "right", "wrong", "false_pass (95 %)", "false_fail (95 %)")
    ]
    for one in found:
        shares = ((one.false_pass, one.false_pass_ci95), (one.false_fail, one.false_fail_ci95))
        cells = [
            "unknown" if share is None else f"{share:.3f} ({low:.3f} to {high:.3f})" for share, (low, high) in shares
        ]
        rows.append((one.task_type or "-", one.verifier or "-", str(one.n_right), str(one.n_wrong), *cells))
    put(columns(rows) if found else "no program has a verdict of a machine and one of a person (verifier human)")
    return 0
