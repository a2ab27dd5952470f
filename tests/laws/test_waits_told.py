"""The journal tells the waits that the router counted, whatever befell the turns."""

from collections import Counter
from pathlib import Path

import pytest
from test_l4_no_leak import Life

from loadwise.journal.entry import make_header
from loadwise.journal.explain import why
from loadwise.journal.store import JournalWriter
from loadwise.kernel import commands as c
from loadwise.kernel import events as e

N_LIVES = 60


def journaled(number: int, path: Path) -> Life:
    """A life that was lived and written down."""
    life = Life(number)
    hear = life.host.send

    with JournalWriter(path, make_header({}, seed=0, host="sim")) as writer:

        def send(event: e.Event) -> list[c.Command]:
            commands = hear(event)
            writer.append(event, commands)
            return commands

        life.host.send = send  # type: ignore[method-assign]
        life.run(Counter())
    return life


def test_what_is_told_of_waits_is_what_the_router_counted(tmp_path: Path) -> None:
    """Of every program that left memory: served, evicted, abandoned, lost, moved, paused, tried again."""
    waited: Counter[str] = Counter()
    for number in range(N_LIVES):
        life = journaled(number, tmp_path / str(number))
        for record in life.host.archived:
            said = why(tmp_path / str(number), record.program_id, lambda _, number=number: Life(number)._stack())
            assert said.is_exact and said.waiting == ()
            if said.record != record or said.arrived_at_s != record.arrived_at_s:
                continue  # the id was used before: of that the record knows nothing
            assert said.wait_s == pytest.approx(record.wait_s, abs=1e-6), (number, record)
            waited["served" if record.n_failed_turns == 0 else "some in vain"] += record.wait_s > 0.0
    assert min(waited["served"], waited["some in vain"]) > 5, waited
