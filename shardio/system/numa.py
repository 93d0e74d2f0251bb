"""Memory near a device: which NUMA node a PCI device is attached to, and pages that prefer a node.

Linux only, and only where the machine has several nodes and the kernel tells and allows it: containers often do not.
Elsewhere nothing is known and nothing is done, which is never an error, as memory on another node is slower, not wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SYSFS = Path("/sys")

# The numbers of set_mempolicy and get_mempolicy for 64-bit processes.
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_MPOL_PREFERRED = 1
# The most that any kernel is built for. get_mempolicy wants room for all nodes that this machine could have.
_MAX_NODES = 1024
# The kernel takes one off before it counts the bits.
_MASK_BITS = ctypes.c_ulong(_MAX_NODES + 1)
_Mask = ctypes.c_ulong * (_MAX_NODES // 64)


class _Policy(NamedTuple):
    mode: int
    nodes: ctypes.Array[ctypes.c_ulong]


def node_of_pci_device(domain: int, bus: int, device: int, sysfs: Path = SYSFS) -> int | None:
    """Returns the node that a PCI device is attached to; None if the kernel does not say, or there is only one node."""
    if len(list((sysfs / "devices" / "system" / "node").glob("node[0-9]*"))) < 2:
        return None
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((sysfs / "bus" / "pci" / "devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1 is unknown


@contextlib.contextmanager
def preferring_node(node: int | None) -> Iterator[None]:
    """Puts new pages of the calling thread on `node` while it has room for them. `None` changes nothing.

    Other threads keep their policy, and afterwards it is what it was before. Memory that the process has already,
    such as what an allocator has kept, stays where it is.
    """
    before = None if node is None else _policy()
    if node is None or before is None or not 0 <= node < _MAX_NODES:
        yield
        return
    nodes = _Mask()
    nodes[node // 64] = 1 << node % 64
    _set_policy(_Policy(_MPOL_PREFERRED, nodes))
    try:
        yield
    finally:
        _set_policy(before)


def _policy() -> _Policy | None:
    """Returns the calling thread's policy; None if the kernel does not tell."""
    mode, nodes = ctypes.c_int(), _Mask()
    told = _call(1, ctypes.byref(mode), nodes, _MASK_BITS, None, ctypes.c_ulong(0))
    return _Policy(mode.value, nodes) if told else None


def _set_policy(policy: _Policy) -> bool:
    """Returns whether the kernel has accepted it."""
    return _call(0, ctypes.c_int(policy.mode), policy.nodes, _MASK_BITS)


def _call(which: int, *arguments: Any) -> bool:
    """Returns whether the syscall is there, is allowed and has worked."""
    numbers = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or sys.maxsize < 2**32 or numbers is None:
        return False
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(numbers[which]), *arguments) == 0)
