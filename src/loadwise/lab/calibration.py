"""Measurements of a running engine, from its HTTP endpoint or from a file, and what a fit to them amounts to.

A measurement is a closed loop of a few requests of one shape; a ladder of them spans what a step's duration depends on:
short and long prompts, one user and many. Prompts never repeat, so a prefix cache finds nothing. What counts is what
the engine says it read and said (`usage`), not what was asked for.
"""

import csv
import http.client
import itertools
import json
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from loadwise.kernel.errors import ConfigError, Error
from loadwise.kernel.fact import Fact
from loadwise.sim.calibrate import MIN_CELLS, Cell

COLUMNS = ("prompt_tokens", "output_tokens", "concurrency", "output_tokens_per_s")
OPTIONAL = ("n_requests", "held_out")
MAX_ROWS = 1000
MAX_TIMES = 100
N_WAYS = 5
MAX_ANSWER_BYTES = 16 << 20


class EngineUnusable(Error):
    """The engine cannot be reached, or does not answer as it must."""

    status = 502
    code = "engine_unusable"


class Rung(NamedTuple):
    """One shape of request of the ladder."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    n_requests: int
    is_held_out: bool = False


_LONG = 1 << 30
"""As long as it is allowed."""

LADDER = (
    Rung(16, 128, 1, 2),
    Rung(16, 64, 8, 16),
    Rung(16, 64, 32, 64),
    Rung(512, 96, 16, 16),
    Rung(1000, 4, 4, 16),
    Rung(_LONG, 4, 1, 4),
    Rung(_LONG, 192, 16, 16),
    Rung(256, 64, 4, 12, is_held_out=True),
    Rung(1000, 64, 8, 16, is_held_out=True),
    Rung(64, 96, 16, 48, is_held_out=True),
)
"""Each cost of a step dominates somewhere: its fixed part and its requests in the first three, products in the two
short answers to many tokens, attention in long prompts, reading KV where many long contexts are continued. Some 20,000
output and 160,000 prompt tokens."""
KV_SHARE = 0.7
"""Of the KV memory that one rung may want: an engine that preempts tells little about its steps."""


class Measured(NamedTuple):
    """Cells to fit, and cells to judge the fit by."""

    fit: list[Cell]
    held_out: list[Cell]


class Endpoint(Fact, frozen=True, kw_only=True):
    """Whom to ask."""

    url: str
    """Up to and including `/v1`."""
    model: str
    api_key: str | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"url is {self.url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {self.url!r}; it must be like http://127.0.0.1:8000/v1")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout is {self.timeout_s!r}; it must be a finite number > 0")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request on a connection of its own.

        Raises:
            EngineUnusable: nobody answers.
        """
        parts = urlsplit(self.url)
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        place = parts.hostname or ""
        try:
            if parts.scheme == "https":
                context = ssl.create_default_context()
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    place, parts.port, timeout=self.timeout_s, context=context
                )
            else:
                connection = http.client.HTTPConnection(place, parts.port, timeout=self.timeout_s)
            try:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, answer.read(MAX_ANSWER_BYTES)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineUnusable(f"engine {self.url!r} cannot be asked: {error or type(error).__name__}") from error

    @property
    def path(self) -> str:
        """Of the API's root, without a slash at its end."""
        return urlsplit(self.url).path.rstrip("/")


def first_model(url: str, api_key: str | None) -> str:
    """The model that an engine lists first.

    Raises:
        EngineUnusable: it cannot be reached, or lists none.
    """
    endpoint = Endpoint(url=url, model="", api_key=api_key)
    status, body = endpoint.request("GET", f"{endpoint.path}/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise EngineUnusable(f"engine {url!r} lists no models (status {status}); name one with --model") from error


def kv_blocks(endpoint: Endpoint) -> tuple[int, int] | None:
    """Blocks and tokens of a block, where the engine exports them as vLLM does."""
    try:
        status, body = endpoint.request("GET", f"{endpoint.path.removesuffix('/v1')}/metrics")
    except EngineUnusable:
        return None
    labels = re.search(r"^vllm:cache_config_info\{(.*)\}", body.decode(errors="replace"), re.M)
    if status != 200 or labels is None:
        return None
    found = dict(re.findall(r'(num_gpu_blocks|block_size)="(\d+)"', labels[1]))
    try:
        return int(found["num_gpu_blocks"]), int(found["block_size"])
    except KeyError:
        return None


class Answer(NamedTuple):
    """What one request used, and when it was over."""

    prompt_tokens: int
    output_tokens: int


class Prober:
    """Sends rungs of a ladder to an engine."""

    def __init__(self, endpoint: Endpoint, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._words = itertools.count(random.Random(seed).randrange(1 << 40))
        self._tokens_per_word = 1.0
        self._way_s = 0.0

    def prepare(self) -> None:
        """Learn how many tokens a word has here; an engine's first request is its slowest, too. Then the way."""
        for n_words in (32, 64):
            answer = self._ask(self._prompt(n_words), 2)
            self._tokens_per_word = max(answer.prompt_tokens / n_words, 0.05)
        self._way_s = min(self._way() for _ in range(N_WAYS))

    def measure(self, rung: Rung, n_times: int = 1) -> Cell:
        """One rung, sent by as many users as it has; of several times the fastest, for all disturbance slows down."""
        return max((self._measure(rung) for _ in range(n_times)), key=lambda cell: cell.output_tokens_per_s)

    def _way(self) -> float:
        """How long a request takes that asks nothing of the engine."""
        began_s = self._clock()
        self.endpoint.request("GET", f"{self.endpoint.path}/models")
        return self._clock() - began_s

    def _measure(self, rung: Rung) -> Cell:
        n_words = max(round(rung.prompt_tokens / self._tokens_per_word), 1)
        # Made before the clock runs: what the prober itself computes would count as the engine's.
        prompts = [self._prompt(n_words) for _ in range(rung.n_requests)]
        with ThreadPoolExecutor(rung.concurrency) as users:
            began_s = self._clock()
            answers = list(users.map(lambda prompt: self._ask(prompt, rung.output_tokens), prompts))
        took_s = self._clock() - began_s
        # The simulated engine is asked without a network, so what that takes of each user's time is left out.
        took_s = max(took_s - self._way_s * rung.n_requests / rung.concurrency, 0.5 * took_s)
        n_output = sum(answer.output_tokens for answer in answers)
        return Cell(
            prompt_tokens=max(round(sum(answer.prompt_tokens for answer in answers) / len(answers)), 1),
            output_tokens=max(round(n_output / len(answers)), 1),
            concurrency=rung.concurrency,
            output_tokens_per_s=n_output / max(took_s, 1e-9),
            n_requests=rung.n_requests,
        )

    def _prompt(self, n_words: int) -> str:
        """Numbers; they differ from their first word on, so no prompt begins like another."""
        digits = random.Random(n_words).choices("0123456789", k=n_words)
        return f"{next(self._words)} {' '.join(digits)}"

    def _ask(self, prompt: str, n_output: int) -> Answer:
        endpoint = self.endpoint
        body = {"model": endpoint.model, "prompt": prompt, "max_tokens": n_output, "temperature": 0, "ignore_eos": True}
        status, data = endpoint.request("POST", f"{endpoint.path}/completions", body)
        if status != 200:
            said = " ".join(data[:300].decode(errors="replace").split())
            raise EngineUnusable(f"engine {endpoint.url!r} answered {status} to {len(prompt)} letters: {said}")
        try:
            usage = json.loads(data)["usage"]
            answer = Answer(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        except (ValueError, LookupError, TypeError) as error:
            raise EngineUnusable(f"engine {endpoint.url!r} does not report usage of a completion") from error
        if answer.prompt_tokens < 1 or answer.output_tokens < 1:
            raise EngineUnusable(
                f"engine {endpoint.url!r} reports {answer.prompt_tokens} prompt and "
                f"{answer.output_tokens} output tokens; each must be >= 1"
            )
        return answer


def ladder(max_concurrency: int, max_prompt_tokens: int, kv_tokens: int | None = None) -> list[Rung]:
    """The ladder within an engine's limits; rungs that become equal count once.

    Args:
        kv_tokens: What the engine's KV memory holds, where that is known.

    Raises:
        ConfigError: a limit is too small.
    """
    for name, value, least in (
        ("--max-concurrency", max_concurrency, 1),
        ("--max-prompt-tokens", max_prompt_tokens, 64),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value!r}; it must be >= {least}")
    rungs: dict[tuple[int, int, int], Rung] = {}
    room = KV_SHARE * kv_tokens if kv_tokens is not None else math.inf
    for rung in LADDER:
        prompt = int(min(rung.prompt_tokens, max_prompt_tokens, max(room - rung.output_tokens, 16)))
        users = int(min(rung.concurrency, max_concurrency, max(room // (prompt + rung.output_tokens), 1)))
        n = max(rung.n_requests * users // rung.concurrency, users, 2)
        short = rung._replace(prompt_tokens=prompt, concurrency=users, n_requests=n)
        rungs.setdefault((short.prompt_tokens, short.output_tokens, users), short)
    return list(rungs.values())


def measure(
    endpoint: Endpoint, rungs: Sequence[Rung], tell: Callable[[str], None], seed: int = 0, n_times: int = 1
) -> Measured:
    """Send the ladder, one rung after the other, each `n_times`.

    Raises:
        EngineUnusable: the engine cannot be reached, or does not answer as it must.
    """
    prober = Prober(endpoint, seed)
    prober.prepare()
    measured = Measured([], [])
    for i, rung in enumerate(rungs):
        cell = prober.measure(rung, n_times)
        (measured.held_out if rung.is_held_out else measured.fit).append(cell)
        tell(
            f"{i + 1} of {len(rungs)}: {cell.concurrency} users, {cell.prompt_tokens} tokens in, "
            f"{cell.output_tokens} out: {cell.output_tokens_per_s:.1f} tokens/s"
        )
    return measured


def read_measurements(path: str) -> Measured:
    """Cells from a CSV file with the columns `COLUMNS` and perhaps `OPTIONAL`.

    Without `held_out` every third row of six or more is held out.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong; the message names file, row, column and value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"measurements {path!r} cannot be read: {error}") from error
    try:
        rows = list(itertools.islice(csv.DictReader(text.splitlines(), strict=True), MAX_ROWS + 1))
    except csv.Error as error:
        raise ConfigError(f"measurements {path!r} cannot be read: {error}") from error
    names = set(rows[0]) if rows else set()
    missing = [name for name in COLUMNS if name not in names]
    unknown = sorted(str(name) for name in names - set(COLUMNS) - set(OPTIONAL))
    if missing or unknown:
        what = f"column {missing[0]!r} is missing" if missing else f"column {unknown[0]!r} is unknown"
        raise ConfigError(f"measurements {path!r}: {what}; columns are {', '.join((*COLUMNS, *OPTIONAL))}")
    if not MIN_CELLS <= len(rows) <= MAX_ROWS:
        raise ConfigError(f"measurements {path!r} has {len(rows)} rows; it must be {MIN_CELLS} to {MAX_ROWS}")
    measured = Measured([], [])
    for i, row in enumerate(rows):
        cell, is_held_out = _cell(path, i, row)
        if "held_out" not in names:
            is_held_out = len(rows) >= 6 and i % 3 == 2
        (measured.held_out if is_held_out else measured.fit).append(cell)
    return measured


def _cell(path: str, i: int, row: dict[str, Any]) -> tuple[Cell, bool]:
    where = f"measurements {path!r}, row {i}"
    whole = {name: _number(where, name, row[name], is_whole=True) for name in COLUMNS[:3]}
    rate = _number(where, COLUMNS[3], row[COLUMNS[3]], is_whole=False)
    n_requests = None
    if row.get("n_requests"):
        n_requests = int(_number(where, "n_requests", row["n_requests"], is_whole=True))
    held_out = row.get("held_out") or "0"
    if held_out not in ("0", "1"):
        raise ConfigError(f"{where}: held_out is {held_out!r}; it must be 0 or 1")
    try:
        cell = Cell(
            prompt_tokens=int(whole["prompt_tokens"]),
            output_tokens=int(whole["output_tokens"]),
            concurrency=int(whole["concurrency"]),
            output_tokens_per_s=rate,
            n_requests=n_requests,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return cell, held_out == "1"


def _number(where: str, name: str, value: Any, *, is_whole: bool) -> float:
    try:
        number = float(value)
        if math.isfinite(number) and number > 0 and (not is_whole or number == int(number)):
            return number
    except (TypeError, ValueError):
        pass
    kind = "a whole number >= 1" if is_whole else "a finite number > 0"
    raise ConfigError(f"{where}: {name} is {value!r}; it must be {kind}")


def mean_absolute(errors: Sequence[float]) -> float:
    """Mean absolute error, as a ratio."""
    return float(np.mean(np.abs(errors)))
