"""System calls that code in a sandbox may not make: they take memory which no limit counts, or no test needs them.

The watcher counts the resident memory of processes and the kernel bounds the private file system. Memory behind
`memfd_create` and System V segments belongs to neither once it is unmapped: a program could fill the machine with it.
The others reach parts of the kernel that have been broken out of and that no program under test has a use for.

The filter is a classic BPF program as `seccomp(2)` has it; bubblewrap loads it after all its own work is done. A denied
call fails as one that the kernel does not have (ENOSYS), so that libraries fall back to what there is.
"""

import platform
import struct

from loadwise.kernel.fact import Fact

_ERRNO_ENOSYS = 0x00050000 | 38
_ALLOW = 0x7FFF0000
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
"""Offsets into `struct seccomp_data`."""


class Machine(Fact, frozen=True, kw_only=True):
    """One architecture of the kernel."""

    audit_architecture: int
    foreign_from: int
    """Numbers from here on belong to another calling convention of the same machine (x32)."""
    denied: dict[str, int]


# fmt: off
_X86_64 = Machine(
    audit_architecture=0xC000003E,
    foreign_from=0x40000000,
    denied={
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "msgget": 68, "mq_open": 240,
        "io_uring_setup": 425, "userfaultfd": 323, "bpf": 321, "perf_event_open": 298, "add_key": 248,
        "request_key": 249, "keyctl": 250, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
        "kexec_load": 246, "mount": 165, "pivot_root": 155, "unshare": 272, "setns": 308, "open_by_handle_at": 304,
    },
)
_AARCH64 = Machine(
    audit_architecture=0xC00000B7,
    foreign_from=0xFFFFFFFF,
    denied={
        "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "shmat": 196, "msgget": 186, "mq_open": 180,
        "io_uring_setup": 425, "userfaultfd": 282, "bpf": 280, "perf_event_open": 241, "add_key": 217,
        "request_key": 218, "keyctl": 219, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
        "kexec_load": 104, "mount": 40, "pivot_root": 41, "unshare": 97, "setns": 268, "open_by_handle_at": 265,
    },
)
# fmt: on
MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def call_filter(machine: str | None = None) -> bytes | None:
    """The filter for a machine as the kernel takes it; None where its numbers are not known here.

    Args:
        machine: as `platform.machine` names it; this one where None.
    """
    known = MACHINES.get(platform.machine() if machine is None else machine)
    if known is None:
        return None
    numbers = sorted(known.denied.values())
    n_left = len(numbers)
    program = [
        _step(_LOAD_WORD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, known.audit_architecture, if_not=n_left + 3),
        _step(_LOAD_WORD, _NUMBER_AT),
        _step(_JUMP_AT_LEAST, known.foreign_from, if_so=n_left + 1),
    ]
    for at, number in enumerate(numbers):
        program.append(_step(_JUMP_EQUAL, number, if_so=n_left - at))
    return b"".join([*program, _step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO_ENOSYS)])


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_so, if_not, value)
