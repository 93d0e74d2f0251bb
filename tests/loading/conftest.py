"""Slots of loaders: spoiled, so that a test that still holds one will see, and counted; and interpreters to end."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator
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
