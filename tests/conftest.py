"""Fixtures for many tests: small sets, images made on the spot, and checks that nothing is left behind.

What imports torch is imported by the fixtures: the process that starts the workers of pytest-xdist does without.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import command
import environment  # noqa: F401 - before NumPy and torch
import numpy as np
import pytest
from environment import why_gpus_are_not_tested
from garbage import freeze_imported
from leaks import descriptors, shared_names, shared_names_left
from places import SHARED, SUPPORT

if TYPE_CHECKING:
    from simulated_cuda import Simulation

pytest.register_assert_rewrite(*{path.stem for path in SUPPORT.glob("*.py")}.difference(sys.modules))
pytest_plugins = ["servers"]

# A shell without a terminal has background jobs ignore Ctrl-C, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist
    if not is_worker and (reason := why_gpus_are_not_tested()):
        pytest.exit(reason, returncode=1)


def lying_beside(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"{name} is not beside this checkout")
    return SHARED / name


@pytest.fixture(scope="session")
def imagenet_sample() -> Path:
    return lying_beside("imagenet-sample")


@pytest.fixture(scope="session")
def bad_images() -> Path:
    """A collection of odd and damaged images."""
    return lying_beside("badimages")


@pytest.fixture
def open_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a socket in `tmp_path`. Bound by a relative name: the path of a socket has at most 107 bytes."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        yield "socket"


@pytest.fixture
def image_tree(tmp_path: Path) -> Path:
    """train/ and val/ with three classes, 12 and 6 JPEGs of different sizes."""
    from pictures import random_picture, write_jpeg

    rng = np.random.default_rng(1)
    root = tmp_path / "images"
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n01", "n02", "n03"):
            for i in range(count):
                height, width = rng.integers(20, 90, 2)
                write_jpeg(root / split / name / f"{name}_{i}.JPEG", random_picture(rng, height, width))
    return root


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., Path]:
    """make_set(num_samples, shape=(6, 5, 3), samples_per_shard=10), as make_plain_set makes it, in `tmp_path`."""
    from plain_sets import make_plain_set

    return partial(make_plain_set, tmp_path)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves out syncing, which would only take time, except in tests/system, which checks what is synced and when."""
    real = os.fsync, os.fdatasync
    if request.path.parent.name != "system":
        os.fsync = os.fdatasync = os.fstat  # which fails, too, if no file has the descriptor
    yield
    os.fsync, os.fdatasync = real


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes in the end what it is given."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made before a read was tried again."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    freeze_imported()


@pytest.fixture(scope="session", autouse=True)
def helping_processes() -> None:
    """Python keeps helper processes, with pipes to them, from the first worker on: not a leak of ours."""
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(command.PRELOADED)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session")
def cuda_is_up() -> None:
    """CUDA opens its descriptors at first use, and keeps them: not a leak of any test."""
    import torch

    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            copy = torch.zeros(8, dtype=torch.uint8, pin_memory=True).to("cuda", non_blocking=True)
            torch.cuda.Stream().wait_event(torch.cuda.current_stream().record_event())
            assert int((torch.mm(copy[None].float(), copy[:, None].float()) != 0).sum()) == 0


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest) -> Iterator[Simulation | None]:
    """Gives tests marked gpu a device. The value is None for a real device, or the stand-in where there is none.

    The arguments of the mark are those of the stand-in.
    """
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        yield None
        return
    import torch

    if torch.cuda.is_available():
        request.getfixturevalue("cuda_is_up")
        yield None
        return
    from simulated_cuda import Simulation

    with Simulation(**mark.kwargs) as simulation:
        yield simulation
        simulation.synchronize()
        assert not simulation.unordered


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test may leave a thread of shardio, a descriptor or an entry in /dev/shm."""
    opened, shared = descriptors(), shared_names()
    yield
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shardio")]
    assert not threads, f"threads left running: {threads}"
    deadline = time.monotonic() + 10
    # Threads of fsspec and of the object store close what they opened for a request some time after the answer came.
    while (more := descriptors() - opened) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more, f"descriptors left open: {more}"
    # Python's resource tracker unlinks the semaphores of a process that was killed, a moment later.
    while (left := shared_names_left(shared)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left in /dev/shm: {left}"
