"""`loadwise doctor POOL.yaml`."""

import argparse
import sys
from typing import TYPE_CHECKING

from .output import add_json_flag, columns, plain, put, put_json
from .pool import add_pool_arguments, read_pool

if TYPE_CHECKING:
    from loadwise.gateway.doctor import BackendReport, Diagnosis

DESCRIPTION = "Reach every backend of a pool file, read its signals, and say what is missing or wrong. Changes nothing."

_STYLE_BY_LEVEL = {"ok": "green", "note": "", "warning": "yellow", "broken": "bold red"}
_HEADINGS = ("backend", "model", "engine", "reached", "capacity", "priority")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pool file, and what is not free."""
    add_pool_arguments(parser)
    parser.add_argument(
        "--test-priority", action="store_true", help="send vLLM and SGLang a request for one token with a priority"
    )
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of each request (default 5)")
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examine. Status 1 if anything is broken."""
    from loadwise.kernel.errors import ConfigError

    config = read_pool(arguments.pool, arguments.settings)
    if not 0 < arguments.timeout_s <= 600:
        raise ConfigError(f"--timeout-s is {arguments.timeout_s!r}; it must be in (0, 600]")

    import asyncio

    from loadwise.gateway.doctor import examine
    from loadwise.gateway.serve import gateway_config

    gateway = gateway_config(config)
    diagnosis = asyncio.run(
        examine(config, gateway, test_priority=arguments.test_priority, timeout_s=arguments.timeout_s)
    )
    if arguments.json:
        put_json({"broken": diagnosis.is_broken, **plain(diagnosis)})
    elif sys.stdout.isatty():
        _draw(diagnosis)
    else:
        put(columns([_HEADINGS, *map(_cells, diagnosis.backends)]))
        put(columns([*map(_signals, diagnosis.backends), *((f.level, f.subject, f.text) for f in diagnosis.findings)]))
        put("something is broken" if diagnosis.is_broken else "nothing is broken")
    return 1 if diagnosis.is_broken else 0


def _cells(report: "BackendReport") -> tuple[str, ...]:
    reached = f"{report.latency_ms:.0f} ms" if report.latency_ms is not None else "no"
    assumed = "" if report.is_capacity_declared else " assumed"
    capacity = f"{report.capacity} {report.capacity_unit}{assumed}"
    return (report.name, report.model, report.engine, reached, capacity, report.priority)


def _signals(report: "BackendReport") -> tuple[str, str, str]:
    """What a backend tells, as a line among the findings: in a column it would make every row as long."""
    signals = " ".join(f"{name}={value:g}" for name, value in report.signals.items()) or "none"
    if report.signals_age_s is not None and report.signals:
        signals += f" ({report.signals_age_s:.1f} s old)"
    if report.missing_signals:
        signals += f"; unknown: {' '.join(report.missing_signals)}"
    return ("signals", report.name, signals)


def _draw(diagnosis: "Diagnosis") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    backends = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        backends.add_column(heading)
    for report in diagnosis.backends:
        backends.add_row(*map(Text, _cells(report)))
    findings = Table(box=None, show_header=False, pad_edge=False)
    for report in diagnosis.backends:
        findings.add_row(*map(Text, _signals(report)))
    for finding in diagnosis.findings:
        level = Text(finding.level, style=_STYLE_BY_LEVEL[finding.level])
        findings.add_row(level, Text(finding.subject), Text(finding.text))
    console.print(backends, findings)
    if diagnosis.is_broken:
        console.print(Text("something is broken", style="bold red"))
    else:
        console.print(Text("nothing is broken", style="green"))
