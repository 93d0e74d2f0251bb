"""`shardio doctor` names what would end a job, with its figure and its cure, and says nothing of a sound machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from places import ROOT

from shardio.cache.folder import Cache
from shardio.cli.main import cli
from shardio.kernels.built import kernels_in_use
from shardio.measure import doctor
from shardio.measure.doctor import CacheState, MachineState, SetState, advise

GB = 10**9
MACHINE = MachineState(
    cores=8,
    cores_of_machine=64,
    memory_left=64 * GB,
    descriptors=65536,
    mappings_left=60_000,
    address_space=None,
    shm_free=GB,
    kernels={},
    missing_kernels="",
    versions={"torch": "2.9.0"},
    has_driver=True,
    torch_cuda="13.0",
    sees_gpu=True,
)
SET = SetState("/data/a set", "ext4", digest="d", num_files=40, nbytes=20 * GB)
CACHE = CacheState("/nvme/cache", "xfs", free_nbytes=100 * GB)


def test_a_sound_machine_needs_no_advice() -> None:
    assert advise(MACHINE, SET, CACHE) == []
    assert advise() == []


@pytest.mark.parametrize(
    ("state", "change", "severity", "figure", "cure"),
    [
        (MACHINE, {"descriptors": 64}, "warning", "64 files", "ulimit -n"),
        (MACHINE, {"mappings_left": 30}, "error", "30 more files, and the set has 40", "vm.max_map_count"),
        (MACHINE, {"mappings_left": 2039}, "warning", "2,039 more files, and the set has 40", "vm.max_map_count"),
        (MACHINE, {"address_space": 10 * GB}, "error", "10 GB (ulimit -v), and the set has 20 GB", "ulimit -v"),
        (MACHINE, {"address_space": 37 * GB}, "warning", "37 GB (ulimit -v), and the set has 20 GB", "ulimit -v"),
        (MACHINE, {"shm_free": 64 << 20}, "warning", "67.1 MB", "--shm-size"),
        (MACHINE, {"missing_kernels": "no kernels: it is slow. Install"}, "warning", "no kernels", "Install"),
        (MACHINE, {"has_driver": False, "sees_gpu": False}, "warning", "is built for CUDA 13.0", "--gpus all"),
        (MACHINE, {"torch_cuda": "", "sees_gpu": False}, "warning", "2.9.0, built without CUDA", "install a torch"),
        (MACHINE, {"sees_gpu": False}, "warning", "built for CUDA 13.0, sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (SET, {"fault": "a shard is missing"}, "error", "a shard is missing", "shardio verify '/data/a set'"),
        (SET, {"path": "s3://a", "fault": "found a URL"}, "error", "a URL", "shardio stage s3://a CACHE"),
        (CACHE, {"fault": "read-only"}, "error", "read-only", "a writable folder"),
        (CACHE, {"free_nbytes": 5 * GB, "evictable_nbytes": 14 * GB}, "error", "5 GB free and 14 GB", "a larger disk"),
        (replace(MACHINE, memory_left=10 * GB), {}, "error", "20 GB of the 10 GB of memory", "the cache on a disk"),
    ],
)
def test_each_fault_is_named_with_its_figure_and_its_cure(
    state: object, change: dict[str, object], severity: str, figure: str, cure: str
) -> None:
    changed = replace(state, **change)  # type: ignore[type-var]
    machine, shards, cache = (changed if isinstance(changed, type(usual)) else usual for usual in (MACHINE, SET, CACHE))
    cache = cache if change else replace(CACHE, filesystem="tmpfs")
    (advice,) = advise(machine, shards, cache)
    assert advice.severity == severity
    assert figure in advice.found
    assert cure in advice.cure


@pytest.mark.parametrize(
    ("machine", "cache"),
    [
        (MACHINE, replace(CACHE, free_nbytes=0, complete=("d",))),
        (MACHINE, replace(CACHE, free_nbytes=5 * GB, evictable_nbytes=15 * GB)),
        (MACHINE, replace(CACHE, filesystem="tmpfs")),
        (replace(MACHINE, mappings_left=2040, address_space=20 * GB + (16 << 30)), CACHE),
        (replace(MACHINE, has_driver=False, torch_cuda="", sees_gpu=False), CACHE),
    ],
)
def test_a_copy_has_room_and_limits_are_met_exactly(machine: MachineState, cache: CacheState) -> None:
    assert advise(machine, SET, cache) == []


def test_errors_come_first() -> None:
    machine = replace(MACHINE, shm_free=0, mappings_left=0)
    assert [advice.severity for advice in advise(machine, SET)] == ["error", "warning"]


def test_a_look_that_does_not_end_is_given_up() -> None:
    ended, threads = threading.Event(), []

    def look() -> None:
        threads.append(threading.current_thread())
        ended.wait()

    with pytest.raises(TimeoutError, match="no answer within"):
        doctor.within("/gone", look, 0.01)
    ended.set()
    for thread in threads:
        thread.join()
    with pytest.raises(KeyError):
        doctor.within("here", lambda: {}[0])


def test_a_made_up_machine_is_read_as_it_is(tmp_path: Path) -> None:
    for name, text in {"driver/nvidia/version": "NVRM", "sys/vm/max_map_count": "100\n", "self/maps": "a\nb\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    found = doctor.look_at_machine(tmp_path)
    assert (found.mappings_left, found.has_driver, found.kernels) == (98, True, kernels_in_use())


def test_a_damaged_and_a_missing_set_are_faults(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(30)
    assert doctor.look_at_set(str(out)).fault == ""
    (out / "train-00001.npy").unlink()
    assert "train-00001.npy" in doctor.look_at_set(str(out)).fault
    assert "does not exist" in doctor.look_at_set(str(tmp_path / "none")).fault


def test_a_look_at_a_cache_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.look_at_cache(str(tmp_path / "new" / "cache"))
    assert (found.fault, found.complete) == ("", ())
    assert os.listdir(tmp_path) == []
    Cache(tmp_path / "made").lease("0" * 64).close()
    assert doctor.look_at_cache(str(tmp_path / "made")).fault == ""
    (tmp_path / "file").write_text("")
    assert "file" in doctor.look_at_cache(str(tmp_path / "file")).fault
    assert "expected a cache" in doctor.look_at_cache(str(tmp_path)).fault
    assert "found a URL" in doctor.look_at_cache("s3://bucket/x").fault
    monkeypatch.setattr(doctor, "try_lock", lambda descriptor: None)
    assert "refuses flock" in doctor.look_at_cache(str(tmp_path / "made")).fault
    monkeypatch.setattr(doctor, "filesystem_kind", lambda path: "nfs4")
    assert "found nfs4" in doctor.look_at_cache(str(tmp_path / "made")).fault


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_cache_that_this_user_may_not_write_to_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o555)
    assert "Permission denied" in doctor.look_at_cache(str(tmp_path / "cache")).fault


def test_the_command_prints_text_of_80_columns_or_json_and_exits_with_1_for_an_error(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    run = CliRunner().invoke
    found = json.loads(run(cli, ["doctor", str(make_set(30)), str(tmp_path / "cache"), "--json"]).stdout)
    assert found["set"]["fault"] == found["cache"]["fault"] == ""
    assert found["machine"]["kernels"] == kernels_in_use()
    assert "secret" not in run(cli, ["doctor", "s3://me:secret@bucket/a", "s3://me:secret@bucket/b"]).output
    text = run(cli, ["doctor", "a\n\x1b[31mset"])
    assert text.exit_code == 1
    assert "a\\n\\x1b[31mset" in text.stdout
    assert "\x1b" not in text.stdout
    assert all(len(line) <= 80 for line in text.stdout.splitlines())


# Leaves the process 64 descriptors, and no kernel for resampling.
POOR = """
import resource, runpy, sys
import torch
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.modules["shardio.kernels._resample"] = None
sys.argv = ["shardio", "doctor"]
runpy.run_module("shardio", run_name="__main__")
"""


def test_a_process_that_has_little_is_told_so() -> None:
    # A new interpreter: a forked one has the kernels already.
    result = subprocess.run([sys.executable, "-c", POOR], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert "this process may open 64 files" in text
    assert "without its kernels in C: augmentation on the CPU" in text
