"""Prometheus text as samples, by exact metric name.

Pages come from engines of all ages and from proxies between: exponents (`9.75e-06`), `NaN`, `+Inf`, timestamps, commas
and braces inside labels, lines torn in the middle. What is no finite number >= 0 is unknown, never zero, and so is what
several engines amount to of which one is unknown.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|\}|$)')
_ESCAPE = re.compile(r"\\(.)")
_END = re.compile(r"\s*\}")


class Sample(NamedTuple):
    """One line: the labels and the value of a metric; NaN where it cannot be read."""

    labels: Mapping[str, str]
    value: float


_TORN = Sample({}, math.nan)


Page = Mapping[str, list[Sample]]
"""Samples by metric name."""


def wanted(names: Iterable[str]) -> re.Pattern[str]:
    """Finds the lines of these metrics and no other; an engine's page may have thousands of others."""
    return re.compile(rf"^({'|'.join(map(re.escape, sorted(names)))})(?=[ \t{{])(.*)$", re.MULTILINE)


def read_page(text: str, lines: re.Pattern[str]) -> Page:
    """The samples of a page whose lines `lines` (from `wanted`) finds.

    >>> page = read_page('a:b{engine="0",m="x} y"} 9.75e-06 1700\\na:b_total 3\\na:b NaN\\n', wanted(["a:b"]))
    >>> page["a:b"]
    [Sample(labels={'engine': '0', 'm': 'x} y'}, value=9.75e-06), Sample(labels={}, value=nan)]
    """
    page: dict[str, list[Sample]] = {}
    for name, rest in lines.findall(text):
        page.setdefault(name, []).append(_sample(rest.strip()))
    return page


def _sample(rest: str) -> Sample:
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        end = _read_labels(rest, labels)
        if end is None:
            return _TORN
        rest = rest[end:]
    words = rest.split()
    if not 1 <= len(words) <= 2 or "_" in words[0]:
        return Sample(labels, math.nan)
    try:
        return Sample(labels, float(words[0]))
    except ValueError:
        return Sample(labels, math.nan)


def _read_labels(rest: str, labels: dict[str, str]) -> int | None:
    """Fill `labels` from `{...}` and say where it ends; None where it is torn."""
    at = 1
    while (end := _END.match(rest, at)) is None:
        found = _LABEL.match(rest, at)
        if found is None or found[3] == "":
            return None
        labels[found[1]] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], found[2])
        at = found.end()
        if found[3] == "}":
            return at
    return end.end()


def fold(page: Page, names: Iterable[str], how: Callable[[Iterable[float]], float]) -> float | None:
    """One value of the first of `names` that the page has: an engine in transition shows a metric under two names.

    Args:
        how: what several engines of one target amount to, `sum` or `max`.
    """
    for name in names:
        samples = page.get(name)
        if samples:
            return folded(samples, how)
    return None


def folded(samples: Iterable[Sample], how: Callable[[Iterable[float]], float]) -> float | None:
    """One value of several samples; None where one of them, or all together, are no finite number >= 0.

    >>> folded([Sample({}, 3.0), Sample({}, math.nan)], sum)
    """
    values = [sample.value for sample in samples]
    if not all(value >= 0.0 for value in values):
        return None
    value = how(values)
    return value if math.isfinite(value) else None


def parts(page: Page, names: Iterable[str]) -> dict[frozenset[tuple[str, str]], float]:
    """What each engine counts of the first of `names` that the page has, by labels."""
    samples = next((page[name] for name in names if page.get(name)), [])
    return {frozenset(sample.labels.items()): sample.value for sample in samples}


def kept(page: Page, keep: Callable[[Mapping[str, str]], bool]) -> Page:
    """The page with those samples only whose labels please `keep`."""
    return {name: [sample for sample in samples if keep(sample.labels)] for name, samples in page.items()}


def of_model(page: Page, model: str) -> Page:
    """What concerns one served model, where a page (a proxy's, or an engine's with several) tells models apart.

    Samples without the label `model_name` concern everything. Where no sample names the model (it is served under
    another name, or is an adapter), all are kept.
    """
    names = {s.labels.get("model_name") for samples in page.values() for s in samples}
    if model not in names or len(names - {None}) < 2:
        return page
    return kept(page, lambda labels: labels.get("model_name", model) == model)
