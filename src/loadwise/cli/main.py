"""`loadwise COMMAND`: finds the command's module, runs it, and turns every expected failure into one line and a status.

Status: 0 it worked, 1 a check failed or the result is bad, 2 the command line or a file is wrong, 130 interrupted.
A command's module has `DESCRIPTION`, `add_arguments(parser)` and `run(arguments) -> int`; it is imported only when the
command is used, and what it needs only when it runs, so that help is instant.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from loadwise import __version__
from loadwise.kernel.errors import ConfigError, Error

SUMMARY_BY_COMMAND = {
    "demo": "run a stream of agents through a real gateway and compare policies",
    "serve": "run the gateway for a pool file",
    "doctor": "reach every backend of a pool file and say what is wrong",
    "presets": "list the presets, or show one",
    "emulate": "run emulated engines behind HTTP",
    "simulate": "run a scenario file in virtual time",
    "calibrate": "fit the simulator's step time to a running engine",
    "journal": "story, replay, verify or cat of a journal",
    "whatif": "estimate what another policy would have earned on a journal's programs",
    "why": "say why a program ran where it ran",
    "pack": "build an experience pack from measured outcomes, or show one",
    "lab": "experiments on measured outcomes and on simulated load",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the process' exit status; only `--help` and `--version` raise SystemExit (0)."""
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _fail(error.message, 2)
    except Error as error:
        return _fail(error.message, 1)
    except BrokenPipeError:
        # The reader (head, less) has what it wanted; Python must not stumble over the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str]) -> int:
    command, rest = _split(argv)
    module = import_module(f"loadwise.cli.{command}")
    parser = Parser(prog=f"loadwise {command}", description=module.DESCRIPTION, allow_abbrev=False)
    module.add_arguments(parser)
    status: int = module.run(parser.parse_args(rest))
    return status


def _split(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command and what follows it."""
    width = max(map(len, SUMMARY_BY_COMMAND))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in SUMMARY_BY_COMMAND.items()]
    parser = Parser(
        prog="loadwise",
        usage="loadwise [-h] [--version] COMMAND ...",
        description="Decides which model runs each agent and when it may start.",
        epilog="commands:\n" + "\n".join(lines) + "\n\nloadwise COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"loadwise {__version__}")
    # By hand: an optional of a command must not be taken for one of ours.
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    parser.parse_args(argv[:at])
    if at == len(argv):
        parser.error("which command? " + ", ".join(SUMMARY_BY_COMMAND))
    if argv[at] not in SUMMARY_BY_COMMAND:
        parser.error(f"command {argv[at]!r} is unknown; known: {', '.join(SUMMARY_BY_COMMAND)}")
    return argv[at], argv[at + 1 :]


def _fail(message: str, status: int) -> int:
    print(f"loadwise: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
