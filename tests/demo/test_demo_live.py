"""The demo's gateways: what each row's pool file asks for."""

import pytest

from loadwise.demo.live import pool_file
from loadwise.demo.run import RowPlan
from loadwise.demo.table import UsdPerMillion
from loadwise.router.config import RouterConfig
from loadwise.settings import parse_config

MODELS = ("small", "large")
PLANS = {
    "loadwise": RowPlan(label="loadwise", policy="loadwise", shares={}, seed=0),
    "random": RowPlan(label="random", policy="random", shares={}, seed=0),
    "mixing": RowPlan(label="mixing", policy="mixing", shares={"small": 0.3, "large": 0.7}, seed=0),
    "fixed": RowPlan(label="fixed:large", policy="fixed", shares={"large": 1.0}, seed=0),
}


def router_of(plan: RowPlan) -> RouterConfig:
    """The router of a row over two engines."""
    prices = dict.fromkeys(MODELS, UsdPerMillion(input=0.1, output=0.4))
    urls = dict.fromkeys(MODELS, "http://127.0.0.1:1/v1")
    slots = dict.fromkeys(MODELS, 4)
    return parse_config(pool_file(prices, urls, plan, engine="emulator", slots_by_model=slots), where="demo").router


@pytest.mark.parametrize("row", ["random", "mixing", "fixed"])
def test_what_the_routed_row_is_compared_with_stays_where_it_was_sent(row: str) -> None:
    """A single model whose waiting programs went elsewhere would be none, and gains over it would be made up."""
    assert router_of(PLANS[row]).divert.when == "never"


def test_rows_differ_in_policy_and_divert_alone() -> None:
    """The routed row is the preset as users have it; everything else is equal in all rows."""
    routed = router_of(PLANS["loadwise"])
    preset = parse_config({"models": {"m": {}}, "backends": [{"name": "m", "model": "m"}], "preset": "loadwise"}).router
    assert (routed.policy, routed.divert) == (preset.policy, preset.divert)
    assert routed.divert.when != "never"
    same = [name for name in RouterConfig.__struct_fields__ if name not in ("policy", "divert")]
    for plan in PLANS.values():
        router = router_of(plan)
        assert [getattr(router, name) for name in same] == [getattr(routed, name) for name in same]
