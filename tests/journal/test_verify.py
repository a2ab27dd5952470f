"""The integrity walk counts everything, reports every damage and raises none."""

import json
from pathlib import Path

import pytest
from journal_fakes import journal, life
from test_reader import offsets

from loadwise.journal import files
from loadwise.journal.verify import cat, verify
from loadwise.kernel.errors import JournalError


def test_a_whole_journal_is_counted(tmp_path: Path) -> None:
    """Segments, snapshots, entries, decisions, credits and bytes."""
    journal(tmp_path / "j", life(10), segment_bytes=4000)
    found = verify(tmp_path / "j")
    assert found.is_whole
    assert (found.n_entries, found.first_sequence, found.last_sequence) == (60, 1, 60)
    assert (found.n_decisions, found.n_credits, found.torn_bytes) == (10, 10, 0)
    assert found.n_segments == len(files.list_segments(tmp_path / "j")) > 1
    assert found.n_snapshots == len(files.list_snapshots(tmp_path / "j")) > 0
    assert found.n_bytes == sum(s.path.stat().st_size for s in files.list_segments(tmp_path / "j"))


def test_every_damage_is_reported(tmp_path: Path) -> None:
    """Two damaged entries, a damaged snapshot and a torn tail are found in one walk, each at its place."""
    journal(tmp_path / "j", life(10), segment_bytes=6000)
    first = tmp_path / "j" / "000001.journal"
    data, begins = bytearray(first.read_bytes()), offsets(first)
    data[begins[3] + 20] ^= 1
    data[begins[9] + 20] ^= 1
    first.write_bytes(data)
    snapshot = files.list_snapshots(tmp_path / "j")[0].path
    snapshot.write_bytes(b"")
    last = files.list_segments(tmp_path / "j")[-1].path
    last.write_bytes(last.read_bytes()[:-3])
    found = verify(tmp_path / "j")
    assert not found.is_whole
    assert found.torn_bytes > 0
    assert found.n_entries == 57
    places = [(p.file, p.offset, p.sequence) for p in found.problems if "damaged" in p.what]
    assert places[:2] == [("000001.journal", begins[3], 4), ("000001.journal", begins[9], 10)]
    assert places[2][0] == snapshot.name
    assert str(found.problems[0]).startswith(f"000001.journal at offset {begins[3]} (sequence 4): ")


def test_missing_segments_and_bad_headers_are_reported(tmp_path: Path) -> None:
    """A segment that is gone, and one whose header is, do not hide the rest."""
    journal(tmp_path / "j", life(20), segment_bytes=3000)
    segments = files.list_segments(tmp_path / "j")
    segments[1].path.unlink()
    segments[3].path.write_bytes(b"not a journal")
    found = verify(tmp_path / "j")
    what = " ".join(p.what for p in found.problems)
    assert "segment 2 is missing before it" in what
    assert "is no journal" in what
    assert found.last_sequence == 120


def test_garbage_is_reported_within_a_bound(tmp_path: Path) -> None:
    """A file of garbage after a header ends the walk, not the walker."""
    journal(tmp_path / "j.journal", life(1))
    with open(tmp_path / "j.journal", "ab") as file:
        file.write(b"\xfeLW\xff" * 5000)
    assert verify(tmp_path / "j.journal").torn_bytes == 20_000


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    """Only a journal that is not there at all raises."""
    with pytest.raises(JournalError, match="holds no segment"):
        verify(tmp_path)


def test_cat_prints_json_lines(tmp_path: Path) -> None:
    """A header line for each segment, then its entries; every line is one JSON object."""
    journal(tmp_path / "j", life(4), segment_bytes=3000)
    lines = [json.loads(line) for line in cat(tmp_path / "j")]
    headers = [line for line in lines if "header" in line]
    entries = [line for line in lines if "header" not in line]
    assert len(headers) == len(files.list_segments(tmp_path / "j")) > 1
    assert [e["sequence"] for e in entries] == list(range(1, 25))
    assert entries[1]["event"]["type"] == "TurnArrived"
    assert entries[1]["decisions"][0]["policy"] == "fake"
