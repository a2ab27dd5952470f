"""What one first request costs to read: the packaged sentence embedder on one thread, by the length of the text.

python -m bench.embed --json [--quick]

A reading is the embedding, its components and the task type told from five examples of each of three types. The
figures are medians of five runs, each the median of its texts, all different. `cpu_p50_ms` is the processor time of the
same readings: what they take where nobody else wants the core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from bench import result
from bench.figures import check
from loadwise.runner.minilm import HEAD_TOKENS, TAIL_TOKENS, Model
from loadwise.runner.reader import Reader, hash_reader
from loadwise.verify.task_types import SelectionSpec
from loadwise.verify.task_types_text import describe

P50_MAX_MS = {40: 20.0, 128: 70.0}
"""By the tokens of the text."""
RUNS = 5

WORDS = (
    "open", "the", "file", "and", "count", "lines", "that", "begin", "with", "a", "number", "then", "write", "result",
    "to", "table", "sorted", "by", "name", "if", "it", "is", "empty", "say", "so", "test", "every", "step", "twice",
)  # fmt: skip
EXAMPLES = {
    "count": ["Count the words of this text.", "How many lines are there?", "How often does it say no?",
              "Number the steps.", "Count what is left over."],
    "sort": ["Sort these names.", "Put the table in order.", "Order the files by size.", "Sort by the last column.",
             "Which comes first?"],
    "write": ["Write a letter to the bank.", "Draft an answer.", "Write a poem.", "Compose a short note.",
              "Write down what happened."],
}  # fmt: skip


def texts_of(model: Model, n_tokens: int, n_texts: int) -> list[str]:
    """Different texts of exactly so many tokens; the words used are one token each."""
    texts = [" ".join(WORDS[(7 * at + 3 * place) % len(WORDS)] for place in range(n_tokens)) for at in range(n_texts)]
    for text in texts:
        assert len(model.tokens(text)) == n_tokens + 2, text
    return texts


def time_ms(reader: Reader, texts: list[str]) -> tuple[float, float]:
    """Median milliseconds of a reading, one text at a time in this thread: as it passed, and of processor time."""
    took = []
    for text in texts:
        begun_at_s, cpu_begun_s = time.perf_counter(), time.thread_time()
        reader._read([text])
        took.append(((time.perf_counter() - begun_at_s) * 1000.0, (time.thread_time() - cpu_begun_s) * 1000.0))
    return statistics.median(wall for wall, _ in took), statistics.median(cpu for _, cpu in took)


def measure(*, quick: bool) -> dict[str, float]:
    """Every figure, in milliseconds."""
    n_texts = 5 if quick else 20
    model = Model()
    reader = Reader(lambda: model, "bench", 16, EXAMPLES, SelectionSpec())
    hashing = hash_reader(16, EXAMPLES, SelectionSpec())
    values: dict[str, float] = {}
    try:
        for n_tokens in (*P50_MAX_MS, 10_000):
            texts = texts_of(model, min(n_tokens, HEAD_TOKENS + TAIL_TOKENS), n_texts)
            if n_tokens > HEAD_TOKENS + TAIL_TOKENS:
                texts = [" ".join([text] * (n_tokens // (HEAD_TOKENS + TAIL_TOKENS))) for text in texts]
            for prefix, one in (("", reader), ("hash.", hashing)):
                runs = [time_ms(one, texts) for _ in range(RUNS)]
                values[f"{prefix}tokens_{n_tokens}.p50_ms"] = round(statistics.median(wall for wall, _ in runs), 3)
                values[f"{prefix}tokens_{n_tokens}.cpu_p50_ms"] = round(statistics.median(cpu for _, cpu in runs), 3)
        begun_at_s = time.perf_counter()
        for text in texts:
            describe(text)
        values["words_and_shapes_ms"] = round((time.perf_counter() - begun_at_s) / len(texts) * 1000.0, 3)
    finally:
        reader.close()
        hashing.close()
    return values


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    values = measure(quick=arguments.quick)
    config: dict[str, Any] = {"threads": 1, "runs": RUNS, "load_average": os.getloadavg()[0]}
    checks = [check(key := f"tokens_{n}.p50_ms", "<=", bound, values[key]) for n, bound in P50_MAX_MS.items()]
    result.show(result.build("bench.embed", values=values, config=config, checks=checks), as_json=arguments.json)


if __name__ == "__main__":
    main()
