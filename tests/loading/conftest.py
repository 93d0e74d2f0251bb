"""Slots of loaders: spoiled, so that a test that still holds one will see, and counted; and interpreters to end."""

from __future__ import annotations

import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interpreters import Interpreter, end, serving


@pytest.fixture(scope="session")
def server() -> Iterator[socket.socket]:
    with serving() as server:
        yield server


@pytest.fixture
def start(server: socket.socket) -> Iterator[Callable[[str, Path], Interpreter]]:
    """start(script, path): an interpreter, which has imported torch, that runs the script. sys.argv[1] is the path."""
    started: list[Interpreter] = []

    def run(script: str, path: Path) -> Interpreter:
        started.append(Interpreter(server, script, str(path)))
        return started[-1]

    yield run
    for interpreter in started:
        end(interpreter)


@pytest.fixture(scope="session")
def squashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 16 pictures of several shapes, made with --fit squash."""
    import numpy as np
    from pictures import encode, random_picture

    from shardio.conversion.convert import convert

    folder, rng = tmp_path_factory.mktemp("squashed"), np.random.default_rng(5)
    (folder / "tree" / "a").mkdir(parents=True)
    for i in range(16):
        picture = random_picture(rng, *rng.integers(60, 90, 2).tolist())
        (folder / "tree" / "a" / f"{i:02}.png").write_bytes(encode(picture, "PNG"))
    convert(folder / "tree", folder / "out", size=48, fit="squash", workers=1, labels="folders")
    return folder / "out"


@pytest.fixture
def in_threads() -> Iterator[Callable[[Callable[[int], None], int], None]]:
    """in_threads(work, count): calls work(0), work(1), ... in threads that take turns as often as Python can."""

    def run(work: Callable[[int], None], count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            for call in [pool.submit(work, number) for number in range(count)]:
                call.result(60)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield run
    sys.setswitchinterval(interval)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoils every slot that a ring takes back or hands out."""
    import numpy as np

    from shardio.loading.ring import Ring, Slot

    acquire, release = Ring.acquire, Ring.release

    def spoil(slot: Slot) -> Slot:
        for array in (slot.memory, slot.labels, slot.indices, *slot.more.values()):
            array.reshape(-1).view(np.uint8).fill(0xEE)
        return slot

    monkeypatch.setattr(Ring, "acquire", lambda ring: spoil(acquire(ring)))
    monkeypatch.setattr(Ring, "release", lambda ring, slot: release(ring, spoil(slot)))


@pytest.fixture
def living_slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many slots in ordinary memory are alive of those that a loader's pipeline made."""
    import shardio.loading.pipeline
    from shardio.loading.ring import Slot

    made: list[weakref.ref[Slot]] = []
    make = shardio.loading.pipeline.new_slot

    def counted(*arguments: object) -> Slot:
        slot = make(*arguments)  # type: ignore[arg-type]
        made.append(weakref.ref(slot))
        return slot

    monkeypatch.setattr(shardio.loading.pipeline, "new_slot", counted)
    return lambda: sum(ref() is not None for ref in made)
