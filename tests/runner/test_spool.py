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
    found, messages = again.jobs()
    assert {j.program_id: len(j.case.answer) for j in found} == {"a": 20, "b": 10} and messages == []
    assert again.n_bytes == spool.n_bytes
    again.remove("a")
    again.remove("never there")
    assert [j.program_id for j in again.jobs()[0]] == ["b"]


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


def test_torn_and_foreign_files_are_removed_and_told(tmp_path):
    """A crash in the middle of a write leaves a temporary file, which is no case."""
    spool = Spool(tmp_path, max_bytes=1000)
    spool.put(job("a"))
    (tmp_path / "x.case").write_bytes(b'{"program_id": 1')
    (tmp_path / "y.case").write_bytes(b'{"program_id": "y", "task_type": "t", "lack": "", "case": {"odd": 1}}')
    (tmp_path / "z.case.tmp").write_bytes(b"half")
    again = Spool(tmp_path, max_bytes=1000)
    found, messages = again.jobs()
    assert [j.program_id for j in found] == ["a"] and len(messages) == 2
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
