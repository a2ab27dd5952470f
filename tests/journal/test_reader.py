"""A journal gives back what was written, or says what is wrong; it never drops an entry in silence."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_fakes import header, journal, life

from loadwise.journal.entry import Entry, encode_entry
from loadwise.journal.frame import HEAD, MAGIC_BYTES, SEGMENT_MAGIC, find_frame, frame, take_frame
from loadwise.journal.reader import Damage, read, read_header
from loadwise.kernel.errors import JournalError, SchemaMismatch
from loadwise.kernel.events import HostRestarted


def offsets(path: Path) -> list[int]:
    """Where each entry begins, and the end of the file."""
    data = path.read_bytes()
    found = [read_header(path)[1]]
    while found[-1] < len(data):
        payload = take_frame(data, found[-1])
        assert payload is not None
        found.append(found[-1] + HEAD.size + len(payload))
    return found


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    """Entries come back in order, with their events, and prompts' artefacts left out."""
    events = life(3)
    journal(tmp_path / "j", events)
    reader = read(tmp_path / "j")
    entries = list(reader)
    assert [e.sequence for e in entries] == list(range(1, len(events) + 1))
    assert [e.event for e in entries if e.event.at_s != 2.0][:2] == events[:2]
    assert b"a secret" not in (tmp_path / "j" / "000001.journal").read_bytes()
    assert reader.header.config == header().config
    assert reader.torn is None


def test_artefacts_are_kept_on_request(tmp_path: Path) -> None:
    """A host may be told to journal artefacts."""
    journal(tmp_path / "j", life(1), keep_artefacts=True)
    assert b"a secret" in (tmp_path / "j" / "000001.journal").read_bytes()


def test_every_truncation_recovers_exactly_the_prefix(tmp_path: Path) -> None:
    """Cut at any byte, a journal reads as the entries that are whole, and names the rest; a cut header is an error."""
    journal(tmp_path / "j", life(2))
    whole = tmp_path / "j" / "000001.journal"
    data, begins, entries = whole.read_bytes(), offsets(whole), list(read(whole))
    cut = tmp_path / "cut.journal"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        if size < begins[0]:
            with pytest.raises(JournalError, match=r"cut\.journal (is empty|ends after|has a torn)"):
                read(cut)
            continue
        n_whole = sum(end <= size for end in begins[1:])
        reader = read(cut)
        assert list(reader) == entries[:n_whole]
        n_torn = size - begins[n_whole]
        if n_torn:
            assert reader.torn is not None
            assert (reader.torn.n_bytes, reader.torn.after_sequence) == (n_torn, n_whole)
            assert f"{n_torn} bytes at offset {begins[n_whole]} after sequence {n_whole}" in str(reader.torn)
        else:
            assert reader.torn is None


def test_every_altered_byte_is_noticed(tmp_path: Path) -> None:
    """One altered byte anywhere is an error that names its place, or, in the last entry, a torn tail."""
    journal(tmp_path / "j", life(2))
    whole = tmp_path / "j" / "000001.journal"
    data, begins, entries = whole.read_bytes(), offsets(whole), list(read(whole))
    altered = tmp_path / "altered.journal"
    for at in range(len(data)):
        altered.write_bytes(data[:at] + bytes([data[at] ^ (1 << (at % 8))]) + data[at + 1 :])
        if at >= begins[-2]:
            reader = read(altered)
            assert list(reader) == entries[:-1]
            assert reader.torn is not None
        elif at >= begins[0]:
            n_before = sum(end <= at for end in begins[1:])
            with pytest.raises(Damage) as caught:
                list(read(altered))
            assert (caught.value.offset, caught.value.sequence) == (begins[n_before], n_before + 1)
            assert "altered.journal" in str(caught.value)
        else:
            with pytest.raises(JournalError):
                read(altered)


@given(tail=st.binary(min_size=1, max_size=200))
@settings(max_examples=50, deadline=None)
def test_a_garbage_tail_is_a_torn_tail(tail: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever bytes follow the last entry, all entries are read and the garbage is measured."""
    path = tmp_path_factory.mktemp("garbage") / "j.journal"
    journal(path, life(1))
    entries = list(read(path))
    with open(path, "ab") as file:
        file.write(tail)
    reader = read(path)
    assert list(reader) == entries
    assert reader.torn is not None
    assert reader.torn.n_bytes == len(tail)


@given(text=st.text(max_size=300))
def test_no_text_looks_like_a_frame(text: str) -> None:
    """What clients send is UTF-8, in which a frame's marker cannot occur, so a torn tail never looks damaged."""
    entry = Entry(sequence=1, event=HostRestarted(at_s=1.0, detail=text + "\x7f\xfeLW\xff"))
    assert find_frame(encode_entry(entry), 0) is None


def test_a_frame_inside_a_torn_frame_is_found() -> None:
    """The search for a following frame passes over markers that begin none."""
    data = b"\xfeLW\xff" + b"x" * 20 + frame(b"payload")
    assert find_frame(data, 0) == 24
    assert take_frame(data, 24) == b"payload"


def test_a_missing_sequence_is_an_error(tmp_path: Path) -> None:
    """An entry cut out of the middle, frame and all, is noticed by its sequence."""
    journal(tmp_path / "j", life(2))
    path = tmp_path / "j" / "000001.journal"
    data, begins = path.read_bytes(), offsets(path)
    path.write_bytes(data[: begins[3]] + data[begins[4] :])
    with pytest.raises(Damage, match=r"sequence 5 stands at offset \d+, where sequence 4 should be"):
        list(read(tmp_path / "j"))


def test_falling_time_is_an_error(tmp_path: Path) -> None:
    """A journal whose instants fall breaks law L3."""
    path = tmp_path / "j.journal"
    journal(path, life(1))
    entry = Entry(sequence=7, event=HostRestarted(at_s=0.5))
    with open(path, "ab") as file:
        file.write(frame(encode_entry(entry)))
    with pytest.raises(Damage, match="law L3"):
        list(read(path))


def test_a_missing_segment_is_an_error(tmp_path: Path) -> None:
    """A segment that was taken from the middle is named."""
    journal(tmp_path / "j", life(6), segment_bytes=2000)
    (tmp_path / "j" / "000002.journal").unlink()
    with pytest.raises(JournalError, match=r"segment 2 is missing before 000003\.journal"):
        read(tmp_path / "j")


def test_a_torn_end_before_another_segment_is_an_error(tmp_path: Path) -> None:
    """Only the journal's own end may be torn: a segment was synced before its successor began."""
    journal(tmp_path / "j", life(6), segment_bytes=2000)
    first = tmp_path / "j" / "000001.journal"
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(Damage, match="a segment that has a successor is torn"):
        list(read(tmp_path / "j"))


def test_seams_between_segments_are_checked(tmp_path: Path) -> None:
    """A segment that lost its last entry, frame and all, does not fit its successor."""
    journal(tmp_path / "j", life(6), segment_bytes=2000)
    first = tmp_path / "j" / "000001.journal"
    first.write_bytes(first.read_bytes()[: offsets(first)[-2]])
    with pytest.raises(Damage, match=r"000002\.journal: a segment from sequence \d+ stands"):
        list(read(tmp_path / "j"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: it has no header"),
        (b"{}\n", "is no journal"),
        (b"not a journal at all", "is no journal: it begins with b'not a jo'"),
        (SEGMENT_MAGIC, "torn or damaged header"),
        (SEGMENT_MAGIC + b"\x00" * 40, "torn or damaged header"),
    ],
)
def test_what_is_no_journal_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """An empty file, another format or a headless file is told apart from a journal."""
    path = tmp_path / "x.journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=message):
        read(path)


def test_a_header_alone_is_an_empty_journal(tmp_path: Path) -> None:
    """A host that was killed before its first event leaves a journal that reads as no entries."""
    journal(tmp_path / "j", [])
    assert list(read(tmp_path / "j")) == []


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    """A path without a journal is named, whether it exists or not."""
    with pytest.raises(JournalError, match="does not exist"):
        read(tmp_path / "nothing")
    with pytest.raises(JournalError, match="holds no segment"):
        read(tmp_path)


def _segment(path: Path, plain_header: object, *entries: object) -> Path:
    encode = msgspec.msgpack.encode
    path.write_bytes(SEGMENT_MAGIC + frame(encode(plain_header)) + b"".join(frame(encode(e)) for e in entries))
    return path


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    """A journal of a later schema is refused by number, even if its header has fields that we do not know."""
    path = _segment(tmp_path / "x.journal", {"schema_version": 99, "novelty": True})
    with pytest.raises(SchemaMismatch, match=r"x\.journal: schema version is 99; this loadwise reads 1"):
        read(path)


def test_an_unknown_event_is_refused(tmp_path: Path) -> None:
    """An event that this version does not know is an error that names sequence, offset and the writer's version."""
    later = msgspec.to_builtins(header()) | {"loadwise_version": "9.9"}
    event = {"type": "MoonRose", "at_s": 1.0}
    path = _segment(tmp_path / "x.journal", later, {"sequence": 1, "event": event})
    assert path.read_bytes()[:MAGIC_BYTES] == SEGMENT_MAGIC
    with pytest.raises(SchemaMismatch, match=r"sequence 1 at offset \d+, written by loadwise 9\.9: .*MoonRose"):
        list(read(path))


def test_a_journal_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """A reader sees whole entries up to what was flushed when it began, whatever comes afterwards."""
    from journal_fakes import make_machine, write

    from loadwise.journal.store import JournalWriter

    machine = make_machine(header())
    with JournalWriter(tmp_path / "j", header()) as writer:
        write(writer, machine, life(1))
        entries = iter(read(tmp_path / "j"))
        assert next(entries).sequence == 1
        write(writer, machine, life(1, first=1))
        assert [e.sequence for e in entries] == [2, 3, 4, 5, 6]
