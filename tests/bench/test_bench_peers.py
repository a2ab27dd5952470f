"""Peers and the processes they run in: configured alike, kept to loopback and one core, skipped with a reason."""

from __future__ import annotations

import json
import logging.config
import os
import signal
import string
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from bench import pinned
from bench.peers import PEERS, peer
from bench.peers.peer import Peer, PeerUnavailable
from bench.pinned import Pinned, ProcessFailed

HERE = Path(peer.__file__).parent
ALLOWED = {"bin", "here", "port", "metrics_port", "engine_url", "key"}
PYTHON = sys.executable


def fields(text: str) -> set[str]:
    """The names in braces."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("found", PEERS.values(), ids=PEERS.keys())
def test_a_peer_is_pinned_on_loopback_and_logs_errors_only(found: Peer) -> None:
    """Every configuration names one version, binds one address and says nothing while it is measured."""
    command = " ".join(found.argv)
    assert found.requirement.count("==") == 1
    assert "--host=127.0.0.1" in found.argv
    assert "0.0.0.0" not in command
    assert "--log-level=error" in found.argv or found.variables.get("LITELLM_LOG") == "ERROR"
    assert found.differs, "a configuration made for measuring differs somewhere"


@pytest.mark.parametrize("found", PEERS.values(), ids=PEERS.keys())
def test_a_peer_asks_only_for_what_start_can_fill_in(found: Peer) -> None:
    """A misspelt placeholder would only show once the peer is installed."""
    texts = [*found.argv, *found.variables.values(), *found.headers.values()]
    assert set().union(*map(fields, texts)) <= ALLOWED


def test_the_peers_of_the_comparison_are_known_under_their_own_names() -> None:
    """The three that the figures are about, and the cheap policies apart from them."""
    assert {"litellm", "smg", "vllm-router"} <= PEERS.keys()
    assert all(name == found.name for name, found in PEERS.items())
    assert "--policy=round_robin" in PEERS["smg-round-robin"].argv
    assert "--policy=cache_aware" in PEERS["smg"].argv


def test_litellm_serves_the_model_that_is_asked_of_it() -> None:
    """The configuration file and the request agree, and no key stands in a file."""
    config = yaml.safe_load((HERE / "litellm.yaml").read_text())
    assert [entry["model_name"] for entry in config["model_list"]] == [PEERS["litellm"].model]
    assert config["general_settings"]["master_key"].startswith("os.environ/")


def test_litellm_logs_no_access() -> None:
    """Its logging file is one that Python takes, and silences each request's line."""
    config = json.loads((HERE / "litellm_logging.json").read_text())
    logging.config.dictConfigClass(config)
    assert config["loggers"]["uvicorn.access"] == {"handlers": [], "level": "ERROR", "propagate": False}


def test_an_environment_that_stands_is_not_made_again(tmp_path: Path) -> None:
    """A stamp with the same requirement is enough."""
    found = msgspec.structs.replace(PEERS["smg"], requirement="nothing==1")
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "installed").write_text("nothing==1")
    assert peer.install(found, tmp_path) == tmp_path / "smg" / "bin"


def test_an_environment_of_another_version_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new pin does not measure the old release; an interrupted installation leaves no stamp."""
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "installed").write_text("smg==0.0.1")
    ran: list[list[str]] = []
    monkeypatch.setattr(peer, "_run", lambda argv, what: ran.append(argv))
    peer.install(PEERS["smg"], tmp_path)
    assert ran[0][1:4] == ["-m", "venv", "--clear"]
    assert ran[1][-1] == "smg==1.13.0"
    assert (tmp_path / "smg" / "installed").read_text() == "smg==1.13.0"


def test_a_failed_installation_is_a_reason_in_one_line() -> None:
    """The report shows pip's error, not its trace."""
    script = "import sys; sys.exit('WARNING: x\\nERROR: no matching distribution\\nhint: y')"
    with pytest.raises(PeerUnavailable, match="installing 'a' failed: ERROR: no matching distribution"):
        peer._run([PYTHON, "-c", script], "installing 'a'")


def test_a_started_peer_gets_its_values_and_nothing_of_our_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placeholders are filled, and PYTHONPATH stays behind."""
    monkeypatch.setenv("PYTHONPATH", "leaks")
    monkeypatch.setattr(peer, "install", lambda found, environments: tmp_path)
    script = "import os, sys; print(sys.argv[1], os.environ['ENGINE'], os.environ.get('PYTHONPATH'))"
    found = Peer(
        name="p",
        requirement="p==1",
        environment_name="p",
        argv=(PYTHON, "-c", script, "{port}"),
        variables={"ENGINE": "{engine_url}"},
        headers={"Authorization": "Bearer {key}"},
    )
    started = peer.start(found, "http://e", pinned.cores()[0], "secret")
    with started.process as process:
        process._process.wait(30)
        assert process.log_tail().split() == [str(started.port), "http://e", "None"]
    assert started.headers == {"Authorization": "Bearer secret"}


def run(script: str) -> Pinned:
    """A Python child on the gateway's core."""
    return Pinned("child", [PYTHON, "-c", script], pinned.cores()[0], os.environ)


def test_a_process_sees_one_core_and_has_the_id_that_is_measured() -> None:
    """What counts its cores to size its pool counts one."""
    with run("import os; print(os.getpid(), sorted(os.sched_getaffinity(0)))") as child:
        child._process.wait(30)
        assert child.log_tail() == f"{child.pid} [{pinned.cores()[0]}]"


def test_a_process_that_ends_is_not_waited_for() -> None:
    """The reason is what it printed last."""
    ended = pytest.raises(ProcessFailed, match="'child' ended with 1: no such option")
    with run("import sys; sys.exit('no such option')") as child, ended:
        child.wait_ready(lambda: False, 30)


def test_a_process_that_never_answers_is_given_up() -> None:
    """The limit is named."""
    late = pytest.raises(ProcessFailed, match="not ready after 0 s")
    with run("import signal; signal.pause()") as child, late:
        child.wait_ready(lambda: False, 0)


def test_a_process_that_ignores_the_request_to_stop_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gateway drains for minutes; a bench does not wait for it."""
    monkeypatch.setattr(pinned, "STOP_LIMIT_S", 0.1)
    child = run("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); signal.pause()")
    child.wait_ready(lambda: child.log_tail() == "on", 30)
    child.stop()
    assert child._process.returncode == -signal.SIGKILL


def test_a_process_that_has_ended_can_still_be_stopped() -> None:
    """Cleaning up after a crash is no error of its own."""
    child = run("pass")
    child._process.wait(30)
    child.stop()
    assert child._process.returncode == 0


def test_this_process_is_let_off_its_core_again() -> None:
    """A bench inside a test run leaves no mark."""
    before = os.sched_getaffinity(0)
    with pinned.pinned_here(pinned.cores()[1]):
        assert os.sched_getaffinity(0) == {pinned.cores()[1]}
    assert os.sched_getaffinity(0) == before


def test_memory_and_time_of_a_process_are_read_from_the_kernel() -> None:
    """This process uses memory, and a child that works uses time."""
    assert 1e6 < pinned.resident_bytes() < 1e11
    with run("sum(range(3_000_000)); print('done', flush=True); import signal; signal.pause()") as child:
        child.wait_ready(lambda: child.log_tail() == "done", 30)
        assert child.cpu_s() > 0
        assert child.resident_bytes() > 1e6
