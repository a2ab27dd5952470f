"""Whose program it is: under configured keys nobody reaches another key's programs; without keys all are one domain."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, message, says
from hypothesis import given
from hypothesis import strategies as st
from sites import Answer, Site, on_loop, site

from loadwise.gateway.tenants import SECRET_BYTES, SECRET_NAME, Tenants, read_secret
from loadwise.kernel.errors import JournalError

KEYS: dict[str, Any] = {"key_env": "KEYS", "environment": {"KEYS": "alpha, beta"}}
ALPHA = {"Authorization": "Bearer alpha"}
BETA = {"Authorization": "bearer  beta"}


async def ask(s: Site, key: dict[str, str], verb: str, program_id: str = "p") -> Answer:
    path = f"/v1/programs/{program_id}"
    if verb == "show":
        return await s.ask("GET", path, headers=key)
    return await s.ask("POST", f"{path}/{verb}", {"verdict": "pass"} if verb == "verdict" else {}, key)


async def listed(s: Site, key: dict[str, str], query: str = "") -> list[str]:
    answer = await s.ask("GET", f"/v1/programs{query}", headers=key)
    return [program["program_id"] for program in answer.json["data"]]


@on_loop
async def test_a_program_belongs_to_the_key_that_opened_it(tmp_path: Path) -> None:
    """Another key's turn is a conflict, to its questions the program is unknown; its own key reaches it as ever."""
    async with site(Engine(), journal=tmp_path, router={"closed_max": 1}, **KEYS) as s:
        assert (await s.chat("p", headers=ALPHA)).status == 200
        answer = await s.chat("p", headers=BETA)
        assert (answer.status, answer.error["code"]) == (409, "program_of_another_key")
        for verb in ("show", "finish", "verdict"):
            answer = await ask(s, BETA, verb)
            assert (answer.status, answer.error["code"]) == (404, "program_not_found")
        assert (await listed(s, ALPHA), await listed(s, BETA)) == (["p"], [])
        assert s.program("p").ended_at_s is None  # type: ignore[union-attr]
        spaced = {"Authorization": "BEARER   alpha"}
        assert (await s.chat("p", headers=spaced)).status == 200
        for verb in ("show", "finish", "verdict", "show"):
            assert (await ask(s, ALPHA, verb)).status == 200


@on_loop
async def test_programs_on_disk_and_after_a_restart_belong_to_their_key_too(tmp_path: Path) -> None:
    """Archived ones are found by their own key only, by list as well; the secret outlives the process."""
    async with site(Engine(), journal=tmp_path, router={"closed_max": 1}, **KEYS) as s:
        for n in range(6):
            key = ALPHA if n % 2 else BETA
            await s.chat(f"p{n}", headers=key)
            assert (await ask(s, key, "verdict", f"p{n}")).status == 200
        assert s.program("p0") is None and s.program("p1") is None, "they have left memory"
    async with site(Engine(), journal=tmp_path, router={"closed_max": 1}, **KEYS) as s:
        assert sorted(await listed(s, ALPHA)) == ["p1", "p3", "p5"]
        assert sorted(await listed(s, BETA, "?limit=2")) == ["p2", "p4"]
        assert (await s.chat("p0", headers=ALPHA)).error["code"] == "program_of_another_key"
        assert (await s.chat("p0", headers=BETA)).error["code"] == "program_finished"
        assert (await ask(s, ALPHA, "show", "p0")).status == 404
        assert (await ask(s, BETA, "show", "p0")).status == 200


@on_loop
async def test_a_conversation_is_continued_under_its_own_key_only() -> None:
    """However the scheme is written; the same words under another key are another program."""
    async with site(Engine(says(message("yes"))), **KEYS) as s:
        first = [{"role": "user", "content": "hi"}]
        then = [*first, message("yes"), {"role": "user", "content": "on"}]
        program = (await s.chat(messages=first, headers=ALPHA)).headers["x-loadwise-program"]
        assert (await s.chat(messages=then, headers=BETA)).headers["x-loadwise-program"] != program
        again = {"Authorization": "bearer alpha"}
        assert (await s.chat(messages=then, headers=again)).headers["x-loadwise-program"] == program
        assert (await s.chat(program, headers=BETA)).status == 409


@on_loop
async def test_without_configured_keys_all_are_one_domain() -> None:
    """Whatever key a client sends, it may go on with any program and judge it."""
    async with site(Engine()) as s:
        assert (await s.chat("p", headers=ALPHA)).status == 200
        assert (await s.chat("p", headers=BETA)).status == 200
        assert (await listed(s, {})) == ["p"]
        assert (await s.verdict("p")).status == 200


@on_loop
async def test_a_label_tells_nothing_of_its_key(tmp_path: Path) -> None:
    """Two gateways label one key differently; neither key nor secret is journaled; the secret is its owner's."""
    labels = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        async with site(Engine(), journal=folder) as s:
            await s.chat("p", headers={"Authorization": "Bearer sk-swordfish"})
            labels.append(s.program("p").tenant)  # type: ignore[union-attr]
        secret = folder / SECRET_NAME
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and len(secret.read_bytes()) == SECRET_BYTES
        for file in folder.iterdir():
            assert b"swordfish" not in file.read_bytes()
            assert file == secret or secret.read_bytes() not in file.read_bytes()
    assert labels[0] != labels[1] and all(len(label) == 16 for label in labels)


def test_a_secret_is_kept_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    """It is made once; one of another length is not ours."""
    secret = read_secret(tmp_path)
    assert read_secret(tmp_path) == secret != read_secret(None)
    (tmp_path / SECRET_NAME).write_bytes(b"")
    with pytest.raises(JournalError, match="0 bytes"):
        read_secret(tmp_path)
    with pytest.raises(JournalError, match="cannot be read or made"):
        read_secret(tmp_path / "absent")


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_labels_differ_as_keys_do(one: bytes, other: bytes) -> None:
    """Equal keys have equal labels, other keys and other secrets others."""
    tenants = Tenants(b"s" * SECRET_BYTES, ("k",))
    labels = [tenants.of({b"authorization": b"Bearer " + key}) for key in (one, other)]
    assert (labels[0] == labels[1]) == (one.strip() == other.strip())
    assert Tenants(b"t" * SECRET_BYTES).of({b"authorization": b"Bearer " + one}) != labels[0]
    assert tenants.of({}) == "" and tenants.may_use(labels[0], "") and not tenants.may_use("", labels[0])
