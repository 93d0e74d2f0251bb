"""`shardio doctor` names each fault with its figure and its cure, and says nothing of a sound machine."""

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
from shardio.measure import facts
from shardio.measure.advice import Advice, CacheFacts, MachineFacts, SetFacts, advise, would_break
from shardio.reading.choose import Facts, choose

GB = 10**9
MACHINE = MachineFacts(
    cores=8,
    cores_of_machine=64,
    cores_granted=8,
    memory_left=64 * GB,
    descriptors=65536,
    mappings=60_000,
    address_space=None,
    locked_memory=8 << 20,
    shm_free=GB,
    huge_pages="madvise",
    numa_nodes=1,
    kernels={},
    missing_kernels="",
    versions={"torch": "2.9.0"},
    torch_cuda="13.0",
    has_driver=True,
    torch_sees_gpu=True,
    gpus={"cuda:0 (H100)": 50e9},
    lost_roots=(),
)
READING = Facts("ext4", 20 * GB, 1.0, 64 * GB, 512)
SET = SetFacts(
    "/data/a set", "ext4", 100 * GB, digest="d", num_files=40, nbytes=20 * GB, split="train", reading=READING
)
CACHE = CacheFacts("/nvme/cache", "xfs", has_locks=True, free_nbytes=100 * GB)


def the_only(found: list[Advice]) -> Advice:
    (advice,) = found
    return advice


def assert_says(advice: Advice, severity: str, figure: str, cure: str) -> None:
    assert advice.severity == severity
    assert figure in advice.found
    assert cure in advice.cure


def test_a_sound_machine_needs_no_advice() -> None:
    assert advise(MACHINE, SET, CACHE) == []
    assert advise() == []


@pytest.mark.parametrize(
    ("change", "severity", "figure", "cure"),
    [
        ({"descriptors": 64}, "warning", "64 files", "ulimit -n"),
        ({"cores": 1, "cores_granted": None}, "warning", "1 of 64 cores", "--cpus-per-task"),
        ({"cores": 2}, "warning", "grants 8 cores, and this process may use 2", "srun"),
        ({"cores_granted": 4}, "hint", "grants 4 cores and binds the job to 8", "num_threads=4"),
        ({"mappings": 30}, "error", "30 more files, the set has 40", "vm.max_map_count"),
        ({"mappings": 1000}, "warning", "1,000 more files, the set has 40", "vm.max_map_count"),
        ({"address_space": 10 * GB}, "error", "10 GB, the set has 20 GB", "ulimit -v unlimited"),
        ({"address_space": 30 * GB}, "warning", "30 GB, the set has 20 GB", "ulimit -v unlimited"),
        ({"shm_free": 64 << 20}, "hint", "67.1 MB", "--shm-size"),
        ({"gpus": {"cuda:0 (H100)": 3e9}}, "hint", "cuda:0 (H100) reach 3 GB/s", "nvidia-smi -q"),
        ({"missing_kernels": "no kernels: it is slow. Install"}, "warning", "no kernels", "Install"),
        ({"versions": {"torch": ""}}, "error", "torch is not installed", "pip install torch"),
        ({"has_driver": False}, "warning", "2.9.0 is built for CUDA 13.0", "--gpus all"),
        ({"torch_cuda": ""}, "warning", "without CUDA", "build of torch with CUDA"),
        ({"torch_sees_gpu": False}, "warning", "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        ({"lost_roots": ("/gone",)}, "warning", "/gone", "SHARDIO_PATH"),
    ],
)
def test_each_fault_of_a_machine_is_named_with_its_cure(
    change: dict[str, object], severity: str, figure: str, cure: str
) -> None:
    found = advise(replace(MACHINE, **change), SET, CACHE)  # type: ignore[arg-type]
    assert_says(the_only(found), severity, figure, cure)
    assert would_break(found) == (severity == "error")


@pytest.mark.parametrize(
    ("change", "severity", "figure", "cure"),
    [
        ({"fault": "a shard is missing"}, "error", "a shard is missing", "shardio verify '/data/a set'"),
        ({"free_nbytes": 0}, "warning", "0 B of free space", "make room"),
        ({"filesystem": "tmpfs"}, "warning", "20 GB are memory", "a folder on a disk"),
        ({"filesystem": "overlay"}, "hint", "overlay", "mount a volume"),
        ({"reading": replace(READING, resident_share=0.25)}, "hint", "25% of its 20 GB", "shardio warm '/data/a set'"),
        ({"reading": replace(READING, resident_share=0.2, nbytes=60 * GB)}, "warning", "64 GB", "--mem"),
    ],
)
def test_each_fault_of_a_set_is_named_with_its_cure(
    change: dict[str, object], severity: str, figure: str, cure: str
) -> None:
    assert_says(the_only(advise(MACHINE, replace(SET, **change), CACHE)), severity, figure, cure)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "severity", "figure", "cure"),
    [
        ({"problem": "read-only"}, "error", "read-only", "a writable folder"),
        ({"has_locks": False}, "error", "refuses flock", "another local disk"),
        ({"free_nbytes": 5 * GB, "evictable_nbytes": 5 * GB}, "error", "5 GB free and 5 GB", "a larger disk"),
        ({"free_nbytes": 5 * GB, "evictable_nbytes": 15 * GB}, "hint", "5 GB free", "shardio evict /nvme/cache"),
        ({"filesystem": "tmpfs"}, "warning", "20 GB of memory", "a cache on a disk"),
        ({"filesystem": "nfs4"}, "warning", "nfs4", "a disk of this machine"),
    ],
)
def test_each_fault_of_a_cache_is_named_with_its_cure(
    change: dict[str, object], severity: str, figure: str, cure: str
) -> None:
    assert_says(the_only(advise(MACHINE, SET, replace(CACHE, **change))), severity, figure, cure)  # type: ignore[arg-type]


def test_a_copy_that_is_there_needs_no_room() -> None:
    assert advise(MACHINE, SET, replace(CACHE, free_nbytes=0, filesystem="tmpfs", complete=("d",))) == []


def test_a_cache_in_memory_that_cannot_hold_the_set_is_an_error() -> None:
    found = advise(replace(MACHINE, memory_left=10 * GB), SET, replace(CACHE, filesystem="tmpfs"))
    assert_says(the_only(found), "error", "20 GB of memory of the 10 GB left", "a cache on a disk")


def test_a_set_on_a_network_filesystem_asks_for_a_cache_unless_there_is_one() -> None:
    far = replace(SET, filesystem="nfs4", reading=replace(READING, filesystem="nfs4", resident_share=None))
    assert_says(the_only(advise(MACHINE, far)), "warning", "nfs4", "cache=")
    assert advise(MACHINE, far, CACHE) == []


def test_advice_says_what_the_loader_says_of_a_set_that_does_not_fit() -> None:
    large = replace(READING, nbytes=200 * GB, resident_share=0.1)
    (advice,) = advise(None, replace(SET, reading=large, reads_per_second=2e9))
    assert choose(large).reason in advice.found
    assert "at the 2 GB/s measured here one epoch takes 2 min" in advice.follows


def test_the_worst_comes_first() -> None:
    machine = replace(MACHINE, shm_free=0, descriptors=64, mappings=0)
    assert [advice.severity for advice in advise(machine, SET)] == ["error", "warning", "hint"]


def test_a_look_that_does_not_end_is_given_up() -> None:
    ended, threads = threading.Event(), []

    def look() -> None:
        threads.append(threading.current_thread())
        ended.wait()

    with pytest.raises(TimeoutError, match="no answer within"):
        facts.within(0.01, "/gone", look)
    ended.set()
    for thread in threads:
        thread.join()
    with pytest.raises(KeyError):
        facts.within(60, "here", lambda: {}[0])


def test_a_made_up_machine_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "driver" / "nvidia" / "version").write_text("NVRM")
    (tmp_path / "sys" / "vm" / "max_map_count").write_text("100\n")
    (tmp_path / "self" / "maps").write_text("a\nb\n")
    found = facts.look_at_machine(tmp_path, {"SLURM_CPUS_PER_TASK": "x", "NCPUS": "3"})
    assert (found.mappings, found.has_driver, found.cores_granted) == (98, True, 3)
    assert found.kernels == kernels_in_use()


def test_a_damaged_and_a_missing_set_are_faults(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(30)
    assert facts.look_at_set(str(out)).fault == ""
    (out / "train-00001.npy").unlink()
    assert "train-00001.npy" in facts.look_at_set(str(out)).fault
    assert "does not exist" in facts.look_at_set(str(tmp_path / "none")).fault


def test_a_look_at_a_cache_makes_nothing(tmp_path: Path) -> None:
    found = facts.look_at_cache(str(tmp_path / "new" / "cache"))
    assert (found.problem, found.complete) == ("", ())
    assert os.listdir(tmp_path) == []
    Cache(tmp_path / "made").lease("0" * 64).close()
    assert facts.look_at_cache(str(tmp_path / "made")).problem == ""
    (tmp_path / "file").write_text("")
    assert "file" in facts.look_at_cache(str(tmp_path / "file")).problem
    assert "expected a cache" in facts.look_at_cache(str(tmp_path)).problem
    assert "found a URL" in facts.look_at_cache("s3://bucket/x").problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_cache_that_this_user_may_not_write_to_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o555)
    assert "Permission denied" in facts.look_at_cache(str(tmp_path / "cache")).problem


def test_the_command_prints_text_of_80_columns_or_json_and_exits_with_1_for_an_error(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    run = CliRunner().invoke
    out = str(make_set(30))
    found = json.loads(run(cli, ["doctor", out, str(tmp_path / "cache"), "--json"]).stdout)
    assert found["set"]["fault"] == ""
    assert found["machine"]["kernels"] == kernels_in_use()
    assert "secret" not in run(cli, ["doctor", "s3://me:secret@bucket/a", "s3://me:secret@bucket/b"]).output
    text = run(cli, ["doctor", "a\n\x1b[31mset"])
    assert text.exit_code == 1
    assert "a\\n\\x1b[31mset" in text.stdout
    assert "\x1b" not in text.stdout
    assert all(len(line) <= 80 for line in text.stdout.splitlines())


# Leaves the process 64 descriptors, one core, and no kernel for resampling.
POOR = """
import os, resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
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
    assert ("this process may use 1 of" in text) == ((os.cpu_count() or 1) > 1)
