"""The kernel's words on filesystems and memory, read from made-up /proc and /sys/fs/cgroup trees."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from disks import failing

from shardio.system.machine import filesystem_kind, is_network, memory_left, usable_cores

GB = 10**9
ESCAPED_SPACE = r"\040"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mountinfo(proc: Path, *mounts: tuple[str, Path | str, str]) -> None:
    """Writes mountinfo with a line for each (device, mount point, kind)."""
    lines = [
        f"{20 + number} 1 {device} / {str(point).replace(' ', ESCAPED_SPACE)} rw,noatime shared:1 - {kind} server:/x rw"
        for number, (device, point, kind) in enumerate(mounts)
    ]
    write(proc / "self" / "mountinfo", "\n".join(lines) + "\n")


def device_of(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


# Filesystems.


def test_a_filesystem_is_told_by_the_device_of_the_file(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    mountinfo(proc, ("0:998", tmp_path, "autofs"), (device_of(tmp_path), "/elsewhere", "nfs4"), ("0:999", "/", "ext4"))
    assert filesystem_kind(tmp_path, proc) == "nfs4"


def test_where_no_mount_has_the_device_the_last_of_the_longest_mount_points_tells(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    inner = tmp_path / "a folder" / "inner"
    inner.mkdir(parents=True)
    # Of mounts over each other, the last counts.
    mounts = [("0:990", tmp_path, "autofs"), ("0:991", "/", "ext4"), ("0:992", tmp_path, "btrfs")]
    mounts += [("0:993", tmp_path / "a folder", "lustre")]
    mountinfo(proc, *mounts, ("0:994", tmp_path / "a fol", "nfs"), ("0:995", inner / "below", "nfs"))
    assert filesystem_kind(inner, proc) == "lustre"
    assert filesystem_kind(tmp_path, proc) == "btrfs"
    assert filesystem_kind("/", proc) == "ext4"
    (tmp_path / "link").symlink_to(inner)
    assert filesystem_kind(tmp_path / "link", proc) == "lustre"


@pytest.mark.parametrize(
    "text", [None, "", "nonsense\n", "1 2 3\n1 2 x:y / / rw - ext4 a b\n", "1 2 0:1 / / rw ext4\n"]
)
def test_a_filesystem_may_be_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        write(tmp_path / "proc" / "self" / "mountinfo", text)
    assert filesystem_kind(tmp_path, tmp_path / "proc") == filesystem_kind(tmp_path / "nothing") == ""


def test_this_machine_knows_its_filesystems(tmp_path: Path) -> None:
    assert filesystem_kind("/proc") == "proc"
    assert filesystem_kind("/dev/shm") == "tmpfs"
    assert filesystem_kind(tmp_path) not in ("", "proc")


NETWORK = """
nfs nfs4 cifs smb3 lustre gpfs beegfs ceph glusterfs 9p fuse fuse.sshfs fuse.glusterfs afs panfs orangefs wekafs vastfs
virtiofs
"""


def test_network_filesystems_are_told_from_local_ones() -> None:
    assert all(map(is_network, NETWORK.split()))
    assert not any(map(is_network, ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs", "fuseblk", "")))


# Memory.


def meminfo(proc: Path, available: int) -> None:
    write(
        proc / "meminfo", f"MemTotal:       99999999 kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total:  0\n"
    )


def v2(folder: Path, current: int, cache: int, high: int | str = "max", **limits: int | str) -> None:
    write(folder / "memory.max", f"{limits.get('limit', 'max')}\n")
    write(folder / "memory.high", f"{high}\n")
    write(folder / "memory.current", f"{current}\n")
    write(
        folder / "memory.stat",
        f"anon 5\nfile {cache + 7}\nactive_file {cache // 4}\ninactive_file {cache - cache // 4}\n",
    )


def v1(folder: Path, limit: int, usage: int, cache: int) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{usage}\n")
    write(folder / "memory.stat", f"cache 1\ninactive_file 3\ntotal_active_file 0\ntotal_inactive_file {cache}\n")


def left(tmp_path: Path) -> int | None:
    return memory_left(tmp_path / "proc", tmp_path / "cgroup")


def test_without_cgroups_it_is_what_the_machine_has_available(tmp_path: Path) -> None:
    assert left(tmp_path) is None
    meminfo(tmp_path / "proc", 1024 * 77)
    assert left(tmp_path) == 1024 * 77
    write(tmp_path / "proc" / "meminfo", "MemTotal: 5 kB\n")
    assert left(tmp_path) is None


@pytest.mark.parametrize("level", ["", "job", "job/step", "job/step/task"])
def test_v2_a_limit_counts_at_every_level_and_page_cache_counts_as_free(tmp_path: Path, level: str) -> None:
    meminfo(tmp_path / "proc", 500 * 1024 * 10**6)
    write(tmp_path / "proc" / "self" / "cgroup", "0::/job/step/task\n")
    for folder in ("job", "job/step", "job/step/task"):
        v2(tmp_path / "cgroup" / folder, 40 * GB, 30 * GB)
    v2(tmp_path / "cgroup" / level, 40 * GB, 30 * GB, limit=64 * GB)
    assert left(tmp_path) == 54 * GB
    v2(tmp_path / "cgroup" / level, 40 * GB, 30 * GB, limit=64 * GB, high=50 * GB)
    assert left(tmp_path) == 40 * GB
    v2(tmp_path / "cgroup" / level, 70 * GB, 0, limit=64 * GB)
    assert left(tmp_path) == 0


@pytest.mark.parametrize("level", ["", "slurm", "slurm/job"])
def test_v1_a_limit_counts_at_every_level_and_page_cache_counts_as_free(tmp_path: Path, level: str) -> None:
    meminfo(tmp_path / "proc", 500 * 1024 * 10**6)
    write(tmp_path / "proc" / "self" / "cgroup", "9:cpu,cpuacct:/x\n4:memory:/slurm/job\n0::/\n")
    for folder in ("slurm", "slurm/job"):
        v1(tmp_path / "cgroup" / "memory" / folder, 9223372036854771712, 40 * GB, 30 * GB)
    assert left(tmp_path) == 500 * 1024 * 10**6
    v1(tmp_path / "cgroup" / "memory" / level, 64 * GB, 40 * GB, 30 * GB)
    assert left(tmp_path) == 54 * GB


@pytest.mark.parametrize("path", ["/docker/0123", "/../../docker/0123"])
def test_in_a_container_the_path_may_be_the_hosts(tmp_path: Path, path: str) -> None:
    write(tmp_path / "proc" / "self" / "cgroup", f"4:memory:{path}\n0::{path}\n")
    v1(tmp_path / "cgroup" / "memory", 8 * GB, 3 * GB, GB)
    assert left(tmp_path) == 6 * GB
    v2(tmp_path / "cgroup", 3 * GB, GB, limit=7 * GB)
    assert left(tmp_path) == 5 * GB


@pytest.mark.parametrize("text", ["", "nonsense", "0", "4:memory", "::::"])
def test_odd_lines_are_passed_over(tmp_path: Path, text: str) -> None:
    meminfo(tmp_path / "proc", 1024 * 77)
    write(tmp_path / "proc" / "self" / "cgroup", text)
    v2(tmp_path / "cgroup", 1, 1, limit="many")
    assert left(tmp_path) == 1024 * 77


def test_this_machine_has_memory_and_cores() -> None:
    found = memory_left()
    assert found is not None
    assert 0 < found < 1 << 50
    assert usable_cores() >= 1


def test_where_the_cores_may_not_be_asked_for_all_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", failing(errno.EPERM), raising=False)
    assert usable_cores(tmp_path, tmp_path) == os.cpu_count()


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "cores"), [("max", 8), (1_600_000, 8), (300_000, 3), (250_000, 3), (1, 1), (0, 8)])
def test_v2_cores_are_what_every_level_gives_time_for(tmp_path: Path, quota: int | str, cores: int) -> None:
    write(tmp_path / "proc" / "self" / "cgroup", "0::/pod/container\n")
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == 8
    for level in ("", "pod", "pod/container"):
        write(tmp_path / "cgroup" / level / "cpu.max", f"{quota} 100000\n")
        assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == cores
        write(tmp_path / "cgroup" / level / "cpu.max", "max 100000\n")


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "period", "cores"), [(-1, 100_000, 8), (200_000, 100_000, 2), (50_000, 20_000, 3)])
def test_v1_cores_are_what_every_level_gives_time_for(tmp_path: Path, quota: int, period: int, cores: int) -> None:
    write(tmp_path / "proc" / "self" / "cgroup", "9:cpu,cpuacct:/docker/0123\n0::/\n")
    write(tmp_path / "cgroup" / "cpu" / "docker" / "0123" / "cpu.cfs_quota_us", f"{quota}\n")
    write(tmp_path / "cgroup" / "cpu" / "docker" / "0123" / "cpu.cfs_period_us", f"{period}\n")
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == cores


def test_limits_of_cores_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "proc" / "self" / "cgroup", "9:cpu:/\n0::/\n")
    write(tmp_path / "cgroup" / "cpu.max", "100000 0\n")
    write(tmp_path / "cgroup" / "cpu" / "cpu.cfs_quota_us", "many\n")
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == usable_cores(tmp_path / "none", tmp_path / "none")
