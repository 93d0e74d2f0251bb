"""Conversions on a real Dask cluster: a scheduler and workers in processes of their own, some of which are killed.

Dask stays in those processes: it keeps threads, and warns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command import assert_one_clear_error, shardio
from folders import hashes
from pictures import random_picture, write_jpeg

from shardio.conversion.convert import convert

if importlib.util.find_spec("distributed") is None:
    pytest.skip("dask.distributed is not installed", allow_module_level=True)

PATIENCE_SECONDS = 120.0
PER_SHARD = 16
NUM_IMAGES = 192
WORDS = ("--size", "64", "--shard-size", str(4096 + PER_SHARD * 64 * 64 * 3))


def wait_until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        file = folder / "scheduler.json"
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", file)
        wait_until(lambda: file.exists() and file.read_bytes().endswith(b"}"), self.processes[0])
        self.address: str = json.loads(file.read_bytes())["address"]

    def _start(self, program: str, *words: str | Path, path: Path | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{program}", *map(str, words), "--no-dashboard"]
        paths = [str(path)] if path else []
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
        with (self.folder / f"{program}-{len(self.processes)}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, text=True, env=env)
        self.processes.append(process)
        return process

    def start_worker(self, path: Path | None = None) -> subprocess.Popen[str]:
        """A worker with one thread, which looks for modules in `path` first."""
        before = self._num_workers()
        words = (self.address, "--host", "127.0.0.1", "--no-nanny", "--nthreads", "1", "--local-directory", self.folder)
        worker = self._start("worker", *words, path=path)
        wait_until(lambda: self._num_workers() > before, worker)
        return worker

    def _num_workers(self) -> int:
        return (self.folder / "scheduler-0.log").read_text().count("Register worker")

    def close(self) -> None:
        for process in self.processes[::-1]:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        cluster.start_worker()
        yield cluster


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 images of ImageNet's size and more, one of them bad, in a train and a val split: 12 shards."""
    rng = np.random.default_rng(11)
    root = tmp_path_factory.mktemp("sources")
    pictures = tmp_path_factory.mktemp("pictures")
    for number in range(16):
        write_jpeg(pictures / f"{number}.JPEG", random_picture(rng, 500, 700))
    for split, count in (("train", 160), ("val", 32)):
        for number in range(count):
            path = root / split / f"n{number % 4}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(pictures / f"{number % 16}.JPEG", path)
    bad = root / "train" / "n0" / "0.JPEG"
    bad.unlink()
    bad.write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def finished(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    convert(src, out, size=64, shard_size=4096 + PER_SHARD * 64 * 64 * 3, workers=1)
    return hashes(out)


def start(src: Path, out: Path, cluster: Cluster) -> subprocess.Popen[str]:
    words = ["convert", str(src), str(out), *WORDS, "--scheduler", cluster.address, "--json"]
    command = [sys.executable, "-W", "error", "-m", "shardio", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_writing(process: subprocess.Popen[str], out: Path) -> bool:
    """Whether the process has a shard of `out` open that is not finished."""
    with contextlib.suppress(FileNotFoundError):  # the descriptor may be closed since it was listed
        for name in os.listdir(f"/proc/{process.pid}/fd"):
            link = os.readlink(f"/proc/{process.pid}/fd/{name}")
            if link.startswith(f"{out}/.") and ".npy." in link:
                return True
    return False


def test_a_worker_killed_in_the_middle_of_a_shard_is_replaced_by_the_other(
    src: Path, tmp_path: Path, finished: dict[str, str], cluster: Cluster
) -> None:
    out = tmp_path / "out"
    victim = cluster.start_worker()
    conversion = start(src, out, cluster)
    wait_until(lambda: is_writing(victim, out) and list(out.glob(".convert/*.npy.json")), conversion)
    victim.kill()
    stdout, stderr = conversion.communicate(timeout=PATIENCE_SECONDS)
    assert conversion.returncode == 0, stderr
    # If the victim had finished a shard but not handed its record over, Dask says so. The shard is not made again. On
    # a busy machine there are lines of progress, too.
    known = ("shardio: ", "distributed.client - WARNING", "refused=")
    assert all(any(word in line for word in known) for line in stderr.splitlines()), stderr
    assert hashes(out) == finished  # and no temporary file of the victim's is left
    report = json.loads(stdout)
    assert (report["num_converted"], report["refused"]) == (NUM_IMAGES, {"empty": 1})


def test_ctrl_c_stops_the_cluster_too_and_the_same_command_goes_on(
    src: Path, tmp_path: Path, finished: dict[str, str], cluster: Cluster
) -> None:
    out = tmp_path / "out"
    conversion = start(src, out, cluster)
    wait_until(lambda: list(out.glob(".convert/*.npy.json")), conversion)
    conversion.send_signal(signal.SIGINT)
    _, stderr = conversion.communicate(timeout=PATIENCE_SECONDS)
    assert conversion.returncode == 130, stderr
    # Dask's own log has a traceback where the interrupt comes between two of its statements.
    dask, _, said = stderr.rpartition("shardio: ")
    assert not dask.strip() or "tornado.application - ERROR" in dask.strip().splitlines()[0], stderr
    assert said.endswith(f" images are kept in {out}; run the same command again to resume\n")
    # A worker that had just published a shard still has its record to write.
    wait_until(
        lambda: (
            not list(out.glob(".*.tmp"))
            and len(list(out.glob("*-0*.npy"))) == len(list(out.glob(".convert/*.json"))) - 1
        )
    )
    found = hashes(out)
    assert "manifest.json" not in found
    assert {name: digest for name, digest in found.items() if not name.startswith(".")}.items() <= finished.items()
    assert not list(out.glob(".convert/run.*"))
    num_finished = len(list(out.glob(".convert/*.npy.json")))
    assert 0 < num_finished < 12
    conversion = start(src, out, cluster)
    stdout, stderr = conversion.communicate(timeout=PATIENCE_SECONDS)
    were_kept = PER_SHARD * num_finished
    assert conversion.returncode == 0, stderr
    assert stderr.endswith(f"shardio: resuming: {were_kept} of {NUM_IMAGES} samples were kept\n")
    assert json.loads(stdout)["num_converted"] == NUM_IMAGES - were_kept
    assert hashes(out) == finished


def test_a_worker_with_another_library_is_named_before_anything_is_made(
    src: Path, tmp_path: Path, cluster: Cluster
) -> None:
    fake = tmp_path / "site" / "pillow-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 0.0.1\n")
    unlike = cluster.start_worker(path=tmp_path / "site")
    out = tmp_path / "out"
    result = shardio("convert", src, out, *WORDS, "--scheduler", cluster.address)
    unlike.kill()
    assert_one_clear_error(
        result, 1, "1 of 2 workers cannot take part: tcp://127.0.0.1:", "found pillow '0.0.1', here '"
    )
    assert not out.exists()
