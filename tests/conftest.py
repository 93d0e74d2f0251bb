"""What many tests need: small sets, images made on the spot, and checks that nothing is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from shardio.conversion.writing.set_writer import ShardWriter

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Real and damaged images, where they are at hand; tests that use them have others of their own making beside them."""


@pytest.fixture(scope="session")
def imagenet_sample() -> Path:
    folder = SHARED / "imagenet-sample"
    if not folder.is_dir():
        pytest.skip("the ImageNet sample is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def bad_images() -> Path:
    folder = SHARED / "badimages"
    if not folder.is_dir():
        pytest.skip("the collection of odd and damaged images is not beside this checkout")
    return folder


def random_picture(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Smooth enough that JPEG keeps it, different in every pixel block."""
    coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(coarse, np.ones((8, 8, 1), np.uint8))[:height, :width])


def write_jpeg(path: Path, pixels: NDArray[np.uint8], quality: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(simplejpeg.encode_jpeg(pixels, quality=quality))


def put(root: Path, *names: str | bytes, content: bytes = b"x") -> None:
    """Files at these paths below `root`; a path that ends in / is an empty folder."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not path.endswith(b"/"):
            with open(path, "wb") as file:
                file.write(content)


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
    rng = np.random.default_rng(1)
    root = tmp_path / "images"
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n01", "n02", "n03"):
            for i in range(count):
                height, width = rng.integers(20, 90, 2)
                write_jpeg(root / split / name / f"{name}_{i}.JPEG", random_picture(rng, height, width))
    return root


def sample_pixels(i: int, shape: tuple[int, int, int] = (6, 5, 3)) -> NDArray[np.uint8]:
    """The pixels of sample i of `small_set`: every sample is different, and known."""
    return np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., Path]:
    """make_set(num_samples, shape=(6, 5, 3), samples_per_shard=10): sample i has sample_pixels(i) and label i % 7."""

    def make(num_samples: int, shape: tuple[int, int, int] = (6, 5, 3), samples_per_shard: int = 10) -> Path:
        out = tmp_path / f"set-{num_samples}-{'x'.join(map(str, shape))}-{samples_per_shard}"
        if not out.exists():
            nbytes = 4096 + samples_per_shard * int(np.prod(shape))
            with ShardWriter(out, shape, classes=[f"c{i}" for i in range(7)], shard_nbytes=nbytes) as writer:
                for i in range(num_samples):
                    writer.append(sample_pixels(i, shape), i % 7, key=f"c{i % 7}/{i}.png")
        return out

    return make


@pytest.fixture(scope="session", autouse=True)
def helping_processes() -> None:
    """Python keeps helper processes, with pipes to them, from the first worker on: not a leak of ours."""
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(forked.PRELOADED)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test may leave a thread of shardio, a descriptor or an entry in /dev/shm."""
    descriptors, shm = _descriptors(), _shm()
    yield
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shardio")]
    assert not threads, f"threads left running: {threads}"
    assert _descriptors() <= descriptors, f"descriptors left open: {_descriptors() - descriptors}"
    # Python's resource tracker unlinks the semaphores of a process that was killed, a moment later.
    deadline = time.monotonic() + 10
    while _shm() - shm and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _shm() <= shm, f"left in /dev/shm: {_shm() - shm}"


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _shm() -> set[str]:
    return set(os.listdir("/dev/shm"))
