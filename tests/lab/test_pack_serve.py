"""A gateway that begins with a pack: it chooses by it at once, and its journal replays without the pack's file."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from loadwise.gateway.serve import gateway_config
from loadwise.journal.entry import make_header
from loadwise.journal.parity import replay
from loadwise.journal.store import JournalWriter
from loadwise.kernel.commands import RecordDecision
from loadwise.kernel.errors import ConfigError
from loadwise.kernel.events import AttemptEnded, Event, TurnArrived, VerdictArrived
from loadwise.kernel.ids import ProgramId, TurnId
from loadwise.kernel.work import AttemptOutcome, Usage, Verdict, VerdictKind
from loadwise.lab.pack_serve import with_pack
from loadwise.lab.whatif import what_if
from loadwise.lab.whatif_log import Refusal
from loadwise.settings import Config, open_stack, parse_config

SAMPLE = Path(__file__).parents[2] / "docs" / "formats" / "pack-sample.json"


def pool(pack: Path, **router: object) -> Config:
    """Three models, one of which the pack does not know."""
    names = ("small", "big", "new")
    return parse_config(
        {
            "models": {name: {"usd_per_million": {"input": 1.0}} for name in names},
            "backends": [{"name": f"b-{name}", "model": name, "engine": "emulator"} for name in names],
            "task_types": {"swe": {}, "chat": {}},
            "router": router,
            "gateway": {"pack": str(pack), "siblings": {"new": "big"}, "embedder": "hash"},
        }
    )


def packed(pack: Path) -> tuple[Config, list[tuple[float, ...]]]:
    """The configuration that serves, and the components of two requests."""
    config = pool(pack)
    config, embedder = with_pack(config, gateway_config(config))
    try:
        texts = ("Fix the traceback in module seven", "What is a noun?")
        return config, [now.components for text in texts if (now := embedder.read_now(text)) is not None]
    finally:
        embedder.close()


def life(number: int, components: tuple[float, ...]) -> list[Event]:
    """A program that is served, judged, and judged otherwise by a person."""
    program_id, at_s = ProgramId(f"p{number}"), float(number)
    said = (VerdictKind.FAIL, VerdictKind.PASS) if number % 3 else (VerdictKind.PASS, VerdictKind.ABSTAIN)
    verdicts = [
        Verdict(verdict=kind, verifier=verifier) for kind, verifier in zip(said, ("tests", "human"), strict=True)
    ]
    return [
        TurnArrived(
            at_s=at_s,
            turn_id=TurnId(number),
            program_id=program_id,
            task_type="swe" if number % 2 else "chat",
            components=components,
            is_final=True,
        ),
        AttemptEnded(
            at_s=at_s,
            turn_id=TurnId(number),
            attempt=1,
            outcome=AttemptOutcome.COMPLETED,
            usage=Usage(prompt_tokens=1000),
        ),
        *(VerdictArrived(at_s=at_s, program_id=program_id, verdict=verdict) for verdict in verdicts),
    ]


def test_a_packed_journal_replays_without_the_pack(tmp_path: Path) -> None:
    """Corrections and withdrawals included; the first choices are the pack's, and what-if knows what it said."""
    pack = tmp_path / "experience.pack.json"
    shutil.copy(SAMPLE, pack)
    config, components = packed(pack)
    assert all(len(row) == config.router.context.n_components for row in components)
    pack.unlink()
    stack, chosen = open_stack(config, 7), []
    with JournalWriter(tmp_path / "j", make_header(msgspec.to_builtins(config), seed=7, host="sim")) as writer:
        for number in range(1, 61):
            for event in life(number, components[number % 2]):
                commands = stack.handle(event)
                writer.append(event, commands)
                chosen += [one.chosen for one in commands if isinstance(one, RecordDecision)]
    stack.check()
    # The second and third are the tries that are owed to the models not yet tried.
    assert chosen[0] in ("big", "new") and chosen[3] == "small" and set(chosen[:3]) == {"small", "big", "new"}
    report = replay(tmp_path / "j")
    assert report.mismatch is None and report.n_entries == 240
    # Sixty decisions are too few for a figure, and that is all that is wrong: the pack's word was at hand.
    with pytest.raises(Refusal, match="decisions are worth"):
        what_if(tmp_path / "j", "linucb?prior_strength=2", learn_ratio=0.1)


def test_a_policy_without_use_for_a_pack_is_refused(tmp_path: Path) -> None:
    """As is a sibling that the pack does not know."""
    config = pool(SAMPLE, policy="random")
    with pytest.raises(ConfigError, match="'random' has no use for a pack"):
        with_pack(config, gateway_config(config))
    config = pool(SAMPLE)
    gateway = msgspec.structs.replace(gateway_config(config), siblings={"new": "nope"})
    with pytest.raises(ConfigError, match="'nope', named for 'new'"):
        with_pack(config, gateway)
