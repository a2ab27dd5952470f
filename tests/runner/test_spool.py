"""What waits to be judged is on disk, whole or not at all, bounded, and nobody else's to read."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.kernel.errors import JournalError
from loadwise.runner.spool import Job, Spool, decode_job, encode_job
from loadwise.verify.case import Case

texts = st.text(st.characters(exclude_categories=()), max_size=50)


@given(texts, texts, st.dictionaries(texts, texts, max_size=3), st.none() | texts)
def test_any_case_comes_back_as_it_was(program_id, answer, artefacts, domain):
    """Halves of surrogate pairs and all; the nonce, which is of one run only, does not."""
    case = Case(program_id=program_id, answer=answer, artefacts=artefacts, references=artefacts, domain=domain)
    job = Job(program_id=program_id, task_type="t", case=case, lack="l")
    assert decode_job(encode_job(job)) == job


def job(name, size=10):
    return Job(program_id=name, task_type="t", case=Case(program_id=name, answer="x" * size))


def test_jobs_outlive_the_process_and_go_when_they_are_judged(tmp_path):
    """Put, read by the next run, removed; a second put of a program replaces the first."""
    spool = Spool(tmp_path / "s", max_bytes=10_000)
    assert spool.put(job("a")) is None and spool.put(job("b")) is None and spool.put(job("a", 20)) is None
    again = Spool(tmp_path / "s", max_bytes=10_000)
    assert [len(again.get(name).case.answer) for name in "ab"] == [20, 10]
    assert again.n_bytes == spool.n_bytes and "a" in again and "c" not in again
    again.remove("a")
    again.remove("never there")
    assert again.get("a") is None and again.get("b") is not None
    again.put(job("c"))
    assert again.keep_only(["b", "unheard of"]) == 1 and "c" not in again and again.get("c") is None


def test_only_its_user_reads_it(tmp_path):
    """Prompts and answers are in it."""
    spool = Spool(tmp_path / "s", max_bytes=10_000)
    spool.put(job("a"))
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "s").iterdir()] == [0o600]


def test_what_finds_no_room_is_told(tmp_path):
    """The bound is of all together; room comes back."""
    spool = Spool(tmp_path, max_bytes=1000)
    assert spool.put(job("a", 500)) is None
    assert "1000 is the limit" in str(spool.put(job("b", 500)))
    spool.remove("a")
    assert spool.put(job("b", 500)) is None


def test_torn_files_are_no_cases_and_foreign_ones_are_removed(tmp_path):
    """A crash in the middle of a write leaves a temporary file, which is no case."""
    spool = Spool(tmp_path, max_bytes=1000)
    spool.put(job("a"))
    (written,) = tmp_path.glob("*.case")
    for torn in (b'{"program_id": 1', b'{"program_id": "y", "task_type": "t", "lack": "", "case": {"odd": 1}}', b""):
        written.write_bytes(torn)
        assert spool.get("a") is None
    (tmp_path / "z.case.tmp").write_bytes(b"half")
    (tmp_path / "foreign.case").write_bytes(b"{}")
    again = Spool(tmp_path, max_bytes=1000)
    assert again.keep_only(["a"]) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_fails_is_told(tmp_path, monkeypatch):
    """Nothing half written is left."""
    spool = Spool(tmp_path / "s", max_bytes=1000)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("loadwise.runner.spool.os.fsync", full)
    assert "No space left" in str(spool.put(job("a")))
    assert list((tmp_path / "s").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError):
        Spool(tmp_path / "file" / "s", max_bytes=1)
