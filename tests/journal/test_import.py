"""Reading a journal runs nobody's code: policy classes that a header names are imported only where that is allowed."""

import sys

import msgspec
import pytest

from loadwise.cli.main import main
from loadwise.journal.entry import make_header
from loadwise.journal.explain import why
from loadwise.journal.parity import replay
from loadwise.journal.recover import recover, resume
from loadwise.journal.regenerate import importing_machine
from loadwise.journal.store import JournalWriter
from loadwise.journal.story import story
from loadwise.kernel.errors import ConfigError, JournalError
from loadwise.kernel.events import TurnArrived
from loadwise.settings import open_stack, parse_config

POOL = {"models": {"m": {}}, "backends": [{"name": "a", "model": "m", "url": "http://127.0.0.1:1"}]}
USERS_OWN = """
from loadwise.policy.fixed import Random

class Own(Random):
    pass
"""
READERS = {
    "replay": replay,
    "recover": recover,
    "story": lambda path: story(path, "p"),
    "why": lambda path: why(path, "p"),
}


def header(policy, options=None):
    """A header whose configuration names a policy, checked or not."""
    config = msgspec.to_builtins(parse_config(POOL))
    config["router"]["policy"] = {"name": policy, "options": options or {}}
    return make_header(config, seed=1)


def write(path, of, machine=None):
    """A journal of one turn under a header."""
    event = TurnArrived(at_s=1.0, turn_id=1, program_id="p")
    with_machine = [] if machine is None else machine.handle(event)
    writer = JournalWriter(path, of)
    writer.append(event, with_machine)
    writer.close()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's that can be imported, and is not yet."""
    (tmp_path / "users_own_policy.py").write_text(USERS_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_own_policy:Own"
    sys.modules.pop("users_own_policy", None)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("field", ["policy", "replica_policy"])
def test_a_header_that_names_a_function_calls_nothing(tmp_path, reader, field):
    """`os:mkdir` with a path among its options makes no directory."""
    crafted = header("linucb")
    crafted.config["router"][field] = {"name": "os:mkdir", "options": {"path": str(tmp_path / "made")}}
    write(tmp_path / "j", crafted)
    with pytest.raises(JournalError, match=r"names the policy class os:mkdir; .*--allow-import") as raised:
        READERS[reader](tmp_path / "j")
    assert raised.value.code == "import_refused"
    assert not (tmp_path / "made").exists()
    with pytest.raises(ConfigError, match="not a class"):
        replay(tmp_path / "j", importing_machine)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("reader", READERS)
def test_a_header_that_names_a_users_class_does_not_import_it(tmp_path, own, reader):
    """Importing a module runs it."""
    write(tmp_path / "j", header(own))
    with pytest.raises(JournalError, match="reading a journal imports no class"):
        READERS[reader](tmp_path / "j")
    assert "users_own_policy" not in sys.modules


@pytest.mark.parametrize(
    "argv", [["journal", "replay"], ["journal", "story", "p", "--journal"], ["why", "p", "--journal"]]
)
def test_commands_import_only_when_told_to(tmp_path, own, argv, capsys):
    """`--allow-import` is for journals of one's own."""
    of = header(own)
    write(tmp_path / "j", of, open_stack(parse_config({**POOL, "router": {"policy": own}}), 1))
    assert main([*argv, str(tmp_path / "j")]) == 1
    assert "--allow-import" in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "j"), "--allow-import"]) == 0


def test_resuming_trusts_the_classes_of_its_own_configuration(tmp_path, own):
    """The user wrote that file; a class that it does not name (any more) is stood in for, and not imported."""
    config = parse_config({**POOL, "router": {"policy": own}})
    of = make_header(msgspec.to_builtins(config), seed=1)
    write(tmp_path / "j", of, open_stack(config, 1))
    writer, recovered = resume(tmp_path / "j", of)
    writer.close()
    assert recovered.n_replayed == 1 and recovered.messages == ()
    sys.modules.pop("users_own_policy")
    plain = make_header(msgspec.to_builtins(parse_config(POOL)), seed=1)
    writer, recovered = resume(tmp_path / "j", plain)
    writer.close()
    assert "users_own_policy" not in sys.modules
    assert recovered.messages == (
        "the policy class users_own_policy:Own of the journal is not imported, for this configuration does not name it",
    )
