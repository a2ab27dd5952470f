"""A program's time: configured, or by header, from its arrival or from its admission."""

from __future__ import annotations

import pytest
from engines import Engine
from sites import on_loop, site


@pytest.mark.parametrize("starts", ["arrival", "admission"])
def test_the_header_goes_before_the_configured_budget(starts: str) -> None:
    """900 s as the benchmarks have it, unless the program's first turn says otherwise; later ones change nothing."""

    @on_loop
    async def run() -> None:
        async with site(Engine(), router={"budget_s": 900, "budget_starts": starts}) as s:
            await s.chat("p")
            await s.chat("q", headers={"X-Loadwise-Budget-S": "12.5"})
            await s.chat("p", headers={"X-Loadwise-Budget-S": "3"})
            for name, budget_s in (("p", 900.0), ("q", 12.5)):
                program = s.program(name)
                assert program is not None and program.admitted_at_s is not None
                begins_at_s = program.arrived_at_s if starts == "arrival" else program.admitted_at_s
                assert program.budget_ends_at_s == begins_at_s + budget_s

    run()
