"""Derive the demo's success table from published MMLU-Pro outcomes.

    python -m experiments.demo_success_table OUTCOMES_DIR > src/loadwise/demo/success_table.yaml

Every choice below was written down, and committed, before any success figure by family was computed:

* Source: TIGER-AI-Lab/MMLU-Pro, eval_results at f418b116 (Apache-2.0), 5-shot chain of thought, as the tables
  outcomes/mmlu_pro and predictions/mmlu_pro of OUTCOMES_DIR. Only aggregates leave this script.
* Families map by subject matter: arithmetic to math, unit problems to physics (quantities with units), string
  problems to computer science, date problems to business (instalments, terms and day counts).
* Models: of those that answered every question, *large* has the highest overall success, *small* the lowest,
  and *medium*, of those whose mean cost lies strictly between the two, the overall success nearest to their
  midpoint.
* Difficulty: a question's grade is how many of the *other* models that answered every question got it right,
  so the three emulated models have no say in it. Within a domain, questions sorted by grade (ties by question
  id) are cut into five equal groups; level 1 is the easiest.
* Success of (model, family, level): the mean of the published outcomes in that group, three decimals, not
  smoothed.
* Output tokens of (model, family): the published answers' mean length (characters / 4 in the source),
  rounded.
* Prices: the folder's price list, whose makers wrote hosted list prices of 2024 down from memory: good for the
  ratio of the models, not to be quoted.
* What this is not: the problems of the demo are not MMLU-Pro questions, and the emulated models are not these
  models; they borrow a real profile. Two models' luck on one task is drawn independently, given family and level.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

IDS = ("mmlu_pro",)
DOMAIN_BY_FAMILY = {
    "arithmetic": "math",
    "dates": "business",
    "strings": "computer science",
    "units": "physics",
}
LEVELS = 5

Row = Mapping[str, Any]


def read(path: Path) -> list[Row]:
    """Read one Parquet table as rows."""
    import pyarrow.parquet as parquet

    rows: list[Row] = parquet.read_table(path).to_pylist()
    return rows


def complete(rows: Iterable[Row], n_questions: int) -> dict[str, dict[str, Row]]:
    """Keep the models that answered every question: model -> question -> row."""
    by_model: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_model[row["model"]][row["task_id"]] = row
    return {model: of for model, of in sorted(by_model.items()) if len(of) == n_questions}


def ladder(outcomes: Mapping[str, Mapping[str, Row]]) -> dict[str, str]:
    """Choose small, medium and large by overall success and mean cost alone."""
    success = {model: fmean(row["success"] for row in of.values()) for model, of in outcomes.items()}
    cost = {model: fmean(row["cost_usd"] for row in of.values()) for model, of in outcomes.items()}
    small, large = min(success, key=success.__getitem__), max(success, key=success.__getitem__)
    middle = (success[small] + success[large]) / 2
    between = [model for model in success if cost[small] < cost[model] < cost[large]]
    return {
        "small": small,
        "medium": min(between, key=lambda model: abs(success[model] - middle)),
        "large": large,
    }


def levels(predictions: Mapping[str, Mapping[str, Row]], emulated: Iterable[str]) -> dict[str, dict[str, int]]:
    """Grade every question by the models that are not emulated: domain -> question -> level 1..5."""
    graders = [of for model, of in predictions.items() if model not in set(emulated)]
    grades: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for question, row in graders[0].items():
        right = sum(of[question]["prediction"] == of[question]["answer"] for of in graders)
        grades[row["domain"]].append((-right, question))
    return {
        domain: {q: 1 + LEVELS * place // len(of) for place, (_, q) in enumerate(sorted(of))}
        for domain, of in grades.items()
    }


def prices(path: Path) -> dict[str, dict[str, float]]:
    """Read the dollars per million tokens of the MMLU-Pro models."""
    with path.open(newline="") as file:
        return {
            row["model"]: {"input": float(row["input_per_m"]), "output": float(row["output_per_m"])}
            for row in csv.DictReader(file)
            if row["harness_or_family"] == "mmlu_pro"
        }


def build(folder: Path) -> dict[str, Any]:
    """Build the whole table."""
    rows = read(folder / "outcomes" / "mmlu_pro.parquet")
    n_questions = len({row["task_id"] for row in rows})
    outcomes = complete(rows, n_questions)
    predictions = complete(read(folder / "predictions" / "mmlu_pro.parquet"), n_questions)
    chosen = ladder(outcomes)
    level_of = levels(predictions, chosen.values())
    price_of = prices(folder / "prices.csv")
    models = {}
    for name, source in chosen.items():
        success, tokens = {}, {}
        for family, domain in DOMAIN_BY_FAMILY.items():
            cells: list[list[float]] = [[] for _ in range(LEVELS)]
            for question, level in level_of[domain].items():
                cells[level - 1].append(outcomes[source][question]["success"])
            success[family] = [round(fmean(cell), 3) for cell in cells]
            tokens[family] = round(fmean(outcomes[source][q]["output_tokens"] for q in level_of[domain]))
        models[name] = {
            "profile_of": source,
            "usd_per_million": price_of[source],
            "output_tokens": tokens,
            "success": success,
        }
    return {
        "version": 1,
        "questions": {family: len(level_of[domain]) for family, domain in DOMAIN_BY_FAMILY.items()},
        "graders": sorted(set(predictions) - set(chosen.values())),
        "models": models,
    }


def main() -> None:
    """Print the table, this script's docstring as its header."""
    doc = (__doc__ or "").splitlines()
    print("\n".join(f"# {line}".rstrip() for line in doc))
    print(yaml.safe_dump(build(Path(sys.argv[1])), sort_keys=False, default_flow_style=None, width=110), end="")


if __name__ == "__main__":
    main()
