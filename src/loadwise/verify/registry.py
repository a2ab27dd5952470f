"""From a configuration to a verifier: one explicit table, strict options."""

from collections.abc import Callable, Mapping

from loadwise.kernel.errors import ConfigError

from .external import External
from .spec import VerifierSpec
from .verifier import Verifier

_FACTORIES: Mapping[str, Callable[[VerifierSpec], Verifier]] = {
    "external": External,
    "human": External,
}


def make_verifier(spec: VerifierSpec) -> Verifier:
    """The verifier that a configuration asks for.

    Raises:
        ConfigError: an option is unknown, missing or out of range; the message names key, value and limit.
    """
    if spec.kind not in _FACTORIES:
        raise ConfigError(f"verifier kind {spec.kind!r} is not built yet")
    return _FACTORIES[spec.kind](spec)
