"""The documents say what is true: samples parse, links lead somewhere, the example policy keeps the contract."""

import re
from pathlib import Path

import pytest

from loadwise.cli.main import SUMMARY_BY_COMMAND
from loadwise.gateway.config import GatewayConfig
from loadwise.gateway.serve import gateway_config
from loadwise.policy.checks import check_policy
from loadwise.policy.registry import policy_names
from loadwise.router.config import RouterConfig
from loadwise.runner.config import VerificationConfig
from loadwise.settings import TaskTypeSpec, parse_config, parse_yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])

SAMPLED = [ROOT / "README.md", ROOT / "docs/formats/pool.md", ROOT / "docs/running-verifiers.md"]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "docs/formats/pool.md", ROOT / "docs/running-verifiers.md"],
    ids=lambda page: page.name,
)
def test_pool_file_samples_are_accepted(page: Path) -> None:
    """What a reader copies starts."""
    samples = [block for block in blocks(page, "yaml") if "backends:" in block]
    assert samples
    for sample in samples:
        gateway_config(parse_config(parse_yaml(sample, where=page.name)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file of the repository."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_key_of_the_pool_file_is_documented() -> None:
    """A key that a user can write stands in the page of the format."""
    page = (ROOT / "docs/formats/pool.md").read_text()
    keys = {*RouterConfig.__struct_fields__, *GatewayConfig.__struct_fields__} - {"trade", "reward"}
    keys |= {*TaskTypeSpec.__struct_fields__, *VerificationConfig.__struct_fields__}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_every_policy_and_command_is_documented() -> None:
    """Policies stand in their page; commands in the README or the help."""
    policies = (ROOT / "docs/policies.md").read_text()
    assert [name for name in policy_names() if f"`{name}`" not in policies] == []
    readme = (ROOT / "README.md").read_text()
    assert [name for name in SUMMARY_BY_COMMAND if name not in readme] == []


def test_every_metric_is_documented() -> None:
    """Each name on the page of the gateway stands in a document, a counter with the suffix that Prometheus sees."""
    source = (ROOT / "src/loadwise/gateway/meter.py").read_text()
    families = re.findall(r'(Counter|Gauge|Summary)MetricFamily\(\s*"(loadwise_\w+)"', source)
    assert len(families) > 25
    names = {f"{name}_total" if kind == "Counter" else name for kind, name in families}
    text = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    assert [name for name in sorted(names) if not re.search(rf"`{name}[`{{]", text)] == []


def test_the_example_policy_keeps_the_contract() -> None:
    """The class that the page shows passes the checks that ours pass."""
    (source, *_) = blocks(ROOT / "docs/policies.md", "python")
    space: dict[str, type] = {}
    exec(compile(source, "mypolicy.py", "exec"), space)
    checks = list(check_policy(space["Cheapest"]))
    assert len(checks) > 5
    for check in checks:
        check.run()
