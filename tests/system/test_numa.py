"""The node that a device is near to, from a made-up /sys; and the policy of this thread, as this kernel tells it."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio.system import numa
from shardio.system.numa import node_of_pci_device, preferring_node

MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3


@pytest.fixture
def sysfs(tmp_path: Path) -> Callable[..., Path]:
    """sysfs(num_nodes, {address: what its numa_node file says})"""

    def make(num_nodes: int, devices: dict[str, str]) -> Path:
        nodes = tmp_path / "devices" / "system" / "node"
        nodes.mkdir(parents=True)
        for name in ("has_cpu", "online", "possible", *(f"node{number}" for number in range(num_nodes))):
            (nodes / name).mkdir()
        for address, text in devices.items():
            folder = tmp_path / "bus" / "pci" / "devices" / address
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(text)
        return tmp_path

    return make


def test_the_kernel_tells_the_node_of_a_device(sysfs: Callable[..., Path]) -> None:
    root = sysfs(2, {"0000:1b:00.0": "0\n", "0001:dc:1f.0": "1\n", "10000:01:00.0": "1\n"})
    assert node_of_pci_device(0, 0x1B, 0, root) == 0
    assert node_of_pci_device(1, 0xDC, 0x1F, root) == 1
    assert node_of_pci_device(0x10000, 1, 0, root) == 1


@pytest.mark.parametrize("text", ["-1\n", "", "none\n"])
def test_what_the_kernel_does_not_tell_is_unknown(text: str, sysfs: Callable[..., Path]) -> None:
    root = sysfs(2, {"0000:1b:00.0": text})
    assert node_of_pci_device(0, 0x1B, 0, root) is None
    assert node_of_pci_device(0, 0x1C, 0, root) is None


def test_where_there_is_one_node_there_is_none_to_prefer(sysfs: Callable[..., Path]) -> None:
    root = sysfs(1, {"0000:1b:00.0": "0\n"})
    assert node_of_pci_device(0, 0x1B, 0, root) is None


def test_a_machine_without_sysfs_tells_nothing(tmp_path: Path) -> None:
    assert node_of_pci_device(0, 0x1B, 0, tmp_path / "nowhere") is None


def nodes_of(policy: numa._Policy) -> list[int]:
    return [bit for bit in range(numa._MAX_NODES) if policy.nodes[bit // 64] >> bit % 64 & 1]


def told() -> tuple[int, list[int]]:
    policy = numa._policy()
    assert policy is not None
    return policy.mode, nodes_of(policy)


@pytest.fixture
def own_policy() -> None:
    """Skips a test where the kernel does not let a thread choose its policy, as in many containers."""
    policy = numa._policy()
    if policy is None or not numa._set_policy(policy):
        pytest.skip("this machine does not let a thread choose its memory policy")


@pytest.mark.usefixtures("own_policy")
def test_the_node_is_preferred_inside_and_the_policy_restored_after() -> None:
    before = told()
    with preferring_node(0):
        assert told() == (MPOL_PREFERRED, [0])
    assert told() == before


@pytest.mark.usefixtures("own_policy")
def test_the_policy_is_restored_after_an_error() -> None:
    before = told()
    with pytest.raises(MemoryError), preferring_node(0):  # noqa: PT012
        assert told() == (MPOL_PREFERRED, [0])
        raise MemoryError
    assert told() == before


@pytest.mark.usefixtures("own_policy")
def test_a_policy_that_was_chosen_before_is_restored() -> None:
    seen = []

    def run() -> None:
        nodes = numa._Mask()
        nodes[0] = 1
        assert numa._set_policy(numa._Policy(MPOL_INTERLEAVE, nodes))
        with preferring_node(0):
            seen.append(told())
        seen.append(told())

    thread = threading.Thread(target=run)  # whose policy ends with it
    thread.start()
    thread.join()
    assert seen == [(MPOL_PREFERRED, [0]), (MPOL_INTERLEAVE, [0])]


@pytest.mark.usefixtures("own_policy")
def test_other_threads_keep_their_policy() -> None:
    seen = []
    inside, looked = threading.Event(), threading.Event()

    def look() -> None:
        seen.append(told())
        inside.wait(60)
        seen.append(told())
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    with preferring_node(0):
        inside.set()
        assert looked.wait(60)
    thread.join()
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("own_policy")
@pytest.mark.parametrize("node", [None, 999, 4096, -1])
def test_no_node_or_one_that_is_not_there_changes_nothing(node: int | None) -> None:
    before = told()
    with preferring_node(node):
        assert told() == before
    assert told() == before


@pytest.mark.parametrize("refusal", ["platform", "architecture", "kernel"])
def test_where_it_cannot_be_done_nothing_is_done(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if refusal == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif refusal == "architecture":
        monkeypatch.setattr(platform, "machine", lambda: "m68k")
    else:
        # There is no such syscall. A container's seccomp filter answers the same.
        monkeypatch.setattr(numa, "_SYSCALLS", {platform.machine(): (10**6, 10**6)})
    with preferring_node(0):
        assert numa._policy() is None


def test_a_kernel_that_tells_the_policy_but_does_not_let_it_be_changed_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def call(which: int, *arguments: object) -> bool:
        asked.append(which)
        return which == 1

    monkeypatch.setattr(numa, "_call", call)
    with preferring_node(0):
        pass
    assert asked == [1, 0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="the headers are Linux's")
@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_the_kernel_s_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not there")
    numbers = dict(
        line.split()[1:3] for line in Path(header).read_text().splitlines() if line.startswith("#define __NR")
    )
    names = ("__NR_set_mempolicy", "__NR_get_mempolicy")
    assert tuple(int(numbers[name]) for name in names) == numa._SYSCALLS[machine]
