"""Every registered policy keeps the contract of `policy.base`."""

from functools import partial

import pytest

from loadwise.policy.checks import Check, check_policy
from loadwise.policy.registry import PolicySpec, make_policy, policy_names

REQUIRED = {"fixed": {"candidate": "b"}, "mixing": {"weights": {"a": 0.2, "b": 0.5, "c": 0.3}}}
"""Options of the policies that do not start without."""

VARIANTS = [
    *((name, REQUIRED.get(name, {})) for name in policy_names()),
    ("linucb", {"gram": "gram_all_mean"}),
    ("linucb", {"gram": "landed"}),
    ("linucb", {"exploration_floor": 0.02, "n_features": 4, "context_version": "v1"}),
    ("lints", {"exploration_floor": 0.0}),
    ("lints", {"gram": "landed"}),
    ("epsilon_greedy", {"exploration_floor": 0.0}),
    ("mixing", {"weights": {"elsewhere": 1.0}}),
    ("fixed", {"candidate": "elsewhere"}),
]

CASES = [
    pytest.param(check, id=f"{name}-{'-'.join(map(str, options.values())) or 'default'}-{check.name}")
    for name, options in VARIANTS
    for check in check_policy(partial(make_policy, PolicySpec(name=name, options=options)))
]


@pytest.mark.parametrize("check", CASES)
def test_contract(check: Check) -> None:
    """The policy passes the check."""
    check.run()
