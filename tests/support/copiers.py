"""A device without CUDA: copies that are made when a test says so."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardio.format.layout import RowType, SampleShape
from shardio.loading.prefetch import Tensors
from shardio.loading.ring import Slot, new_slot

NOT_COPIED = 0xAA
SECONDS = 0.25


def finish_some(seed: int) -> Callable[[FakeCopier], None]:
    """Returns a function that finishes some copies of a copier, as time that passes would."""
    rng = random.Random(seed)

    def let_time_pass(copier: FakeCopier) -> None:
        while copier.unfinished and rng.random() < 0.4:
            copier.finish_oldest()

    return let_time_pass


class FakeTransfer:
    """A copy that is made by `finish`, from what the slot holds at that time."""

    def __init__(self, stream: FakeCopier, slot: Slot) -> None:
        self.stream = stream
        self.seconds = self.stall_seconds = 0.0
        self.finished = False

    def start(self, slot: Slot, size: int) -> None:
        self.slot = slot
        self.size = size
        self.number = self.stream.note_start(self)
        views = [np.empty_like(view[:size]) for view in slot.views]
        for view in views:
            view.view(np.uint8).fill(NOT_COPIED)
        self.views = tuple(torch.from_numpy(view).permute(0, 3, 1, 2) for view in views)
        more = {name: torch.from_numpy(np.zeros_like(array[:size])) for name, array in slot.more.items()}
        images = self.views if len(views) > 1 else self.views[0]
        self.tensors = Tensors(images, torch.full((size,), -1), torch.full((size,), -1), more)

    def finish(self) -> None:
        assert not self.finished
        self.finished = True
        self.seconds = SECONDS
        for tensor, array in (
            *((view.permute(0, 2, 3, 1), array) for view, array in zip(self.views, self.slot.views, strict=True)),
            (self.tensors.labels, self.slot.labels),
            (self.tensors.indices, self.slot.indices),
            *((tensor, self.slot.more[name]) for name, tensor in self.tensors.more.items()),
        ):
            tensor.copy_(torch.from_numpy(array[: self.size]))

    def done(self) -> bool:
        self.stream.let_time_pass()
        return self.finished

    def wait(self) -> None:
        self.stream.log.append(f"wait {self.number}")
        while not self.finished:
            self.stream.finish_oldest()

    def hand_over(self) -> Tensors:
        self.stream.log.append(f"hand over {self.number}")
        return self.tensors


class FakeCopier:
    """One stream: its copies are made one after the other, in the order in which they were started."""

    def __init__(self, let_time_pass: Callable[[FakeCopier], None] = lambda copier: None) -> None:
        self.unfinished: deque[FakeTransfer] = deque()
        self.started = 0
        self.reserved: list[weakref.ref[FakeTransfer]] = []
        self.most_unfinished = 0
        self.log: list[str] = []
        self._let_time_pass = let_time_pass

    def new_slot(self, batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType]) -> Slot:
        return new_slot(batch_size, sample_shape, more)

    def reserve(self, slot: Slot) -> FakeTransfer:
        transfer = FakeTransfer(self, slot)
        self.reserved.append(weakref.ref(transfer))
        return transfer

    def note_start(self, transfer: FakeTransfer) -> int:
        self.log.append(f"start {self.started}")
        self.started += 1
        self.unfinished.append(transfer)
        self.most_unfinished = max(self.most_unfinished, len(self.unfinished))
        return self.started - 1

    def finish_oldest(self) -> None:
        self.unfinished.popleft().finish()

    def synchronize(self) -> None:
        while self.unfinished:
            self.finish_oldest()

    def let_time_pass(self) -> None:
        self._let_time_pass(self)


class FakeDevice:
    """A GPU, for loaders and for the limit of pinned copies: its copies are unfinished until the host waits for them.

    `unfinished` and `finished` have the addresses of what the limit copies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copiers: list[FakeCopier] = []
        self.pinned: list[torch.Tensor] = []
        self.unfinished: list[int] = []
        self.finished: list[int] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a double of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr("shardio.loading.pipeline.make_copier", self.make_copier)
        double = SimpleNamespace(empty=self.empty, uint8=torch.uint8, cuda=torch.cuda)
        monkeypatch.setattr("shardio.measure.limits.torch", double)

    def empty(self, shape: Any, *, dtype: torch.dtype, pin_memory: bool = False, device: object = None) -> Any:
        memory = torch.empty(shape, dtype=dtype)
        if not pin_memory:
            return SimpleNamespace(copy_=partial(self.copy, memory))
        self.pinned.append(memory)
        return memory

    def make_copier(self, device: torch.device) -> FakeCopier | None:
        if device.type == "cpu":
            return None
        self.copiers.append(FakeCopier())
        return self.copiers[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        assert (source.shape, source.dtype) == (target.shape, target.dtype)
        self.unfinished.append(source.data_ptr())

    def synchronize(self, device: torch.device) -> None:
        assert device == torch.device("cuda:0")
        self.finished += self.unfinished
        self.unfinished.clear()
        for copier in self.copiers:
            copier.synchronize()

    def idle(self) -> bool:
        return not self.unfinished and not any(copier.unfinished for copier in self.copiers)
