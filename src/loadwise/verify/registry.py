"""From a configuration to a verifier: one explicit table, strict options.

To add a kind: write its class beside the others, name it in `spec.VERIFIER_KINDS`, add one line here, and a section to
docs/verification.md; `tests/verify/test_registry.py` then runs the contract of verifiers over it.
"""

from collections.abc import Callable, Mapping

from loadwise.kernel.errors import ConfigError

from .choice import Choice
from .container import ContainerTests
from .exact import Exact
from .external import External
from .fusion import Fusion
from .judge import Judge
from .mathematics import Mathematics
from .numeric import Numeric
from .patch import PatchTests
from .services import Command, Webhook
from .spec import EXTERNAL, VerifierSpec
from .state import StateCheck
from .unit_tests import UnitTests
from .verifier import Verifier


def make_verifier(spec: VerifierSpec) -> Verifier:
    """The verifier that a configuration asks for.

    >>> make_verifier(VerifierSpec(kind="choice", options={"choice": 4}))
    Traceback (most recent call last):
    ...
    loadwise.kernel.errors.ConfigError: verifier 'choice' has no option 'choice'; it has choices

    Raises:
        ConfigError: an option is unknown, missing or out of range; the message names key, value and limit.
    """
    for key, kind in (("run", "command"), ("url", "webhook")):
        if getattr(spec, key) is not None and spec.kind not in (kind, EXTERNAL):
            raise ConfigError(f"verifier {spec.kind!r} has the key {key!r}, which belongs to kind {kind!r}")
    return _FACTORIES[spec.kind](spec)


def _fusion(spec: VerifierSpec) -> Verifier:
    return Fusion(spec, make_verifier)


_FACTORIES: Mapping[str, Callable[[VerifierSpec], Verifier]] = {
    "external": External,
    "human": External,
    "exact": Exact,
    "choice": Choice,
    "numeric": Numeric,
    "math": Mathematics,
    "code": UnitTests,
    "patch": PatchTests,
    "container": ContainerTests,
    "state": StateCheck,
    "judge": Judge,
    "command": Command,
    "webhook": Webhook,
    "fusion": _fusion,
}
