"""What `lab selector` found, as JSON, as Markdown and as rows for a terminal."""

from typing import Any

import numpy as np

from loadwise import __version__

from .report import commit, machine
from .selector import Cell, Measured
from .task_lists import task_digest


def as_json(found: Measured) -> dict[str, Any]:
    """The one object of `--json`."""
    config = found.config
    counts = np.bincount(found.texts.owner, minlength=len(found.texts.classes)).tolist()
    return {
        "name": "lab.selector",
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "seeds": [config.seed],
        "config": {
            "embedder": config.embedder.model or config.embedder.kind,
            "draws": config.n_draws,
            "k": list(config.k),
            "half": config.half,
            "margin": config.margin,
            "texts_max": config.n_texts,
            "text_ids_sha256": task_digest(found.texts.marks),
            "texts_per_class": dict(zip(found.texts.classes, counts, strict=True)),
        },
        "values": found.values,
        "ci95": {key: list(bounds) for key, bounds in found.ci95.items()},
        "peers": {},
        "checks": found.checks,
        "dropped": found.texts.dropped,
    }


def as_rows(found: Measured) -> list[tuple[str, ...]]:
    """One row for each class of each cell, and one for the cell, in per cent."""
    rows: list[tuple[str, ...]] = [("classes", "rule", "k", "class", "right, %", "95 %", "kept, %", "right of kept, %")]
    for cell in found.cells:
        prefix = f"{'' if cell.rule == 'ridge' else cell.rule + '.'}{cell.name}.k{cell.k}"
        for name, key in [*((one, f"{prefix}.{one}") for one in cell.classes), ("mean", prefix)]:
            rows.append((cell.name, cell.rule, str(cell.k), name, *_cells(found, key)))
        for family in cell.by_family:
            key = f"{prefix}.family.{family}"
            rows.append((cell.name, cell.rule, str(cell.k), f"  {family}", *_cells(found, key)))
    return rows


def as_markdown(found: Measured) -> str:
    """A table for each set of classes: accuracy by class and k, and what the margin keeps."""
    counts = np.bincount(found.texts.owner, minlength=len(found.texts.classes))
    named = ", ".join(f"{name} {n}" for name, n in zip(found.texts.classes, counts, strict=True))
    config = found.config
    lines = [
        f"Texts: {named} (at most {config.n_texts} of a class, half: {config.half}); {config.n_draws} draws, seed"
        f" {config.seed}, embedder {config.embedder.model or config.embedder.kind}, margin {config.margin:g}.",
        "",
    ]
    for name in dict.fromkeys(cell.name for cell in found.cells):
        cells = [cell for cell in found.cells if cell.name == name]
        classes = cells[0].classes
        lines += [
            f"| {name}: rule, k | {' | '.join(classes)} | kept | right of kept |",
            f"| --- | {'---: | ' * len(classes)}---: | ---: |",
        ]
        lines += [_line(found, cell) for cell in cells]
        lines.append("")
    return "\n".join(lines)


def _line(found: Measured, cell: Cell) -> str:
    prefix = f"{'' if cell.rule == 'ridge' else cell.rule + '.'}{cell.name}.k{cell.k}"
    parts = []
    for one in cell.classes:
        low, high = found.ci95[f"{prefix}.{one}.accuracy"]
        parts.append(f"{_percent(found.values[f'{prefix}.{one}.accuracy'])} [{100 * low:.0f}, {100 * high:.0f}]")
    kept, right = found.values[f"{prefix}.coverage"], found.values.get(f"{prefix}.kept_accuracy", float("nan"))
    return f"| {cell.rule}, {cell.k} | {' | '.join(parts)} | {_percent(kept)} | {_percent(right)} |"


def _cells(found: Measured, key: str) -> tuple[str, str, str, str]:
    low, high = found.ci95[f"{key}.accuracy"]
    rest = (found.values.get(f"{key}.{name}") for name in ("coverage", "kept_accuracy"))
    kept, right = ("" if value is None else _percent(value) for value in rest)
    return _percent(found.values[f"{key}.accuracy"]), f"[{_percent(low)}, {_percent(high)}]", kept, right


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f}"
