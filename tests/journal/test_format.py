"""The format stands: the committed sample reads as it was written."""

import shutil
from pathlib import Path

from loadwise.journal.entry import SCHEMA_VERSION
from loadwise.journal.frame import HEAD, MARKER, SEGMENT_MAGIC
from loadwise.journal.reader import read
from loadwise.journal.story import story
from loadwise.journal.verify import verify
from loadwise.kernel.events import TurnArrived, VerdictArrived

SAMPLE = Path(__file__).parents[2] / "docs" / "formats" / "journal-sample.journal"


def test_the_sample_is_whole() -> None:
    """Every entry of the sample decodes under today's events, and its counts are known."""
    found = verify(SAMPLE)
    assert found.is_whole
    assert (found.n_entries, found.n_decisions, found.n_credits, found.torn_bytes) == (15, 3, 2, 0)
    assert read(SAMPLE).header.schema_version == SCHEMA_VERSION == 1


def test_the_sample_says_what_it_said() -> None:
    """Companion of the count: one program from its arrival to its credit."""
    events = [entry.event for entry in read(SAMPLE)]
    assert sum(isinstance(event, TurnArrived) for event in events) == 3
    assert sum(isinstance(event, VerdictArrived) for event in events) == 3
    kinds = [line.kind for line in story(SAMPLE, "p0", None)]
    assert kinds == [
        "turn_arrived",
        "record_decision",
        "attempt_ended",
        "program_ended",
        "verdict_arrived",
        "record_credit",
    ]


def test_the_frame_is_as_documented() -> None:
    """The bytes that docs/formats/journal.md names."""
    data = SAMPLE.read_bytes()
    assert data[:8] == SEGMENT_MAGIC == bytes.fromhex("894C574A0D0A1A0A")
    assert data[8:12] == MARKER == bytes.fromhex("FE4C57FF")
    assert HEAD.size == 12
    text = (SAMPLE.parent / "journal.md").read_text(encoding="utf-8")
    assert "`89 4C 57 4A 0D 0A 1A 0A`" in text
    assert "`FE 4C 57 FF`" in text


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    """A reader creates no lock and changes no byte."""
    shutil.copy(SAMPLE, tmp_path / "j.journal")
    assert len(list(read(tmp_path / "j.journal"))) == 15
    verify(tmp_path / "j.journal")
    assert [p.name for p in tmp_path.iterdir()] == ["j.journal"]
    assert (tmp_path / "j.journal").read_bytes() == SAMPLE.read_bytes()
