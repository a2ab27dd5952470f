"""The filter of system calls, read as the kernel reads it: what is denied, and what is not."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadwise.runner.system_calls import MACHINES, call_filter

ALLOWED, DENIED = 0x7FFF0000, 0x00050000 | 38


def answered(program: bytes, architecture: int, number: int) -> int:
    """What the kernel makes of one call: a machine of one register that jumps forward only."""
    data = struct.pack("<iI", number - (1 << 32) if number >= 1 << 31 else number, architecture)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    register, at = 0, 0
    while True:
        code, if_so, if_not, value = steps[at]
        if code == 0x06:
            return int(value)
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
            at += 1
            continue
        holds = register == value if code == 0x15 else register >= value
        at += 1 + (if_so if holds else if_not)


@pytest.mark.parametrize("name", MACHINES)
@given(number=st.integers(0, 0xFFFFFFFF), other=st.integers(0, 0xFFFFFFFF))
def test_what_is_listed_is_denied_and_nothing_else(name: str, number: int, other: int) -> None:
    """Every number, every architecture: a foreign one, or a foreign calling convention, is denied as a whole."""
    machine, program = MACHINES[name], call_filter(name)
    assert program is not None and len(program) % 8 == 0
    denied = machine.denied.values()
    for asked in (number, number % 512):
        is_denied = asked in denied or asked >= machine.foreign_from
        assert answered(program, machine.audit_architecture, asked) == (DENIED if is_denied else ALLOWED)
    for asked in denied:
        assert answered(program, machine.audit_architecture, asked) == DENIED
    if other != machine.audit_architecture:
        assert answered(program, other, number) == DENIED


def test_a_machine_that_is_not_known_has_no_filter() -> None:
    """Numbers of another machine would deny the wrong calls."""
    assert call_filter("riscv64") is None
    assert all(len(set(machine.denied.values())) == len(machine.denied) for machine in MACHINES.values())
    assert len({tuple(machine.denied) for machine in MACHINES.values()}) == 1, "each denies the same calls"
