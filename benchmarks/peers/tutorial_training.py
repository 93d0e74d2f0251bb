"""Training a small ResNet in two processes on the CPU, with DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from run import delivered, import_peer
from torch import nn
from torch.distributed import TCPStore, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
LOADING, TRAINING = "loading", f"training by {RANKS} ranks on the CPU"
Batch = tuple[torch.Tensor, torch.Tensor, Any]
# (out, batch size, threads, rank, ranks, epochs): batches of images, labels and numbers.
Load = Callable[[Path, int, int, int, int, int], Iterator[Batch]]


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, 2, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, 2, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def small_resnet() -> nn.Module:
    """Returns a network of 8 layers: a stem that halves twice, and three blocks that halve once each."""
    stem = (nn.Conv2d(3, 16, 7, 4, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    blocks = (Block(16, 32), Block(32, 64), Block(64, 128))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000))


def end_with_the_parent() -> None:
    """Ends this process when the parent has: the parent leaves without a word to its children."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def train(module: str, name: str, port: int, rank: int, done: Any, words: tuple[Any, ...]) -> None:
    """Trains on the batches of one rank, and puts the numbers of each step's samples into `done`; None at the end."""
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    init_process_group("gloo", store=TCPStore("127.0.0.1", port), rank=rank, world_size=RANKS)
    out, batch_size, workers, repeats = words
    load: Load = import_peer(module).LOADERS[name]
    model = DistributedDataParallel(small_resnet())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with model.join():  # the last batches of the ranks may differ
        for images, labels, numbers in load(out, batch_size, workers, rank, RANKS, repeats):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            done.put([int(number) for number in numbers])
    done.put(None)
    destroy_process_group()


def next_of(done: Any, ranks: list[Any]) -> Any:
    """Returns what a rank puts next. Raises RuntimeError if one has failed."""
    while True:
        with suppress(queue.Empty):
            return done.get(timeout=1)
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank has failed")


def trained(module: str, name: str) -> Callable[..., Any]:
    """Returns the way that trains on a loader of the module. It yields the numbers learned from, and no pixels."""

    def way(*words: Any) -> Any:
        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            context = get_context("spawn")
            done, store = context.Queue(), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = [
                # Daemons: when one rank has failed, this process need not wait for the other.
                context.Process(target=train, args=(module, name, store.port, rank, done, words), daemon=True)
                for rank in range(RANKS)
            ]
            for process in ranks:
                process.start()
            running = RANKS
            while running:
                numbers = next_of(done, ranks)
                if numbers is None:
                    running -= 1
                else:
                    yield None, numbers

        return epoch

    return way


def loaded(load: Load) -> Callable[..., Any]:
    """Returns the way that only loads, in this process."""

    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            batches = load(out, batch_size, workers, 0, 1, repeats)
            for _, numbers in delivered((images, numbers) for images, _, numbers in batches):
                yield None, numbers

        return epoch

    return way


def ways(module: str, loaders: dict[str, Load]) -> dict[str, Callable[..., Any]]:
    return {f"{name}: {LOADING}": loaded(load) for name, load in loaders.items()} | {
        f"{name}: {TRAINING}": trained(module, name) for name in loaders
    }
