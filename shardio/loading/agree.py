"""Whether the ranks of a job read the same epochs: each compares its loader with the loader of another rank.

The n-th loader of a split has the same key on all ranks, in the store of torch.distributed. The key's value is a sheet,
on which a rank says what it reads. A rank that has come further puts its own sheet there. No rank waits for a late one.
"""

from __future__ import annotations

import json
import queue
import time
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from shardio.errors import LaunchError, show
from shardio.loading.pipeline import Pipeline
from shardio.loading.state import Place, Position
from shardio.loading.world import World, check_world, store_of_torch
from shardio.system.threads import DaemonThread

# How long the store may take to answer, and a rank at another place to move on.
LIMIT_SECONDS = 10.0
# A sheet lists so many epochs: the first that its rank has begun, and the latest.
_MOST_BEGUN = 32

_NUMBERS: Counter[tuple[str, int, int]] = Counter()


class Sheet(NamedTuple):
    """What a rank reads. `reads` maps arguments to values. `begun` has [epoch, consumed, number of states loaded,
    digest of the transform] for the first epoch that the rank has begun, and for the latest epochs."""

    rank: int
    reads: dict[str, Any]
    begun: list[list[Any]]

    def difference(self, other: Sheet) -> tuple[str, Any, Any] | None:
        """Returns (name, own value, other value) of a difference; None if there is none, or if the other rank is
        behind. Epochs, consumed samples and transforms may become equal: `Agreement.check` compares these again."""
        for name in {**self.reads, **other.reads}:
            if self.reads.get(name) != other.reads.get(name):
                return name, self.reads.get(name), other.reads.get(name)
        here, there = self.begun[-1], other.begun[-1]
        if met := [one[3] for one in other.begun if one[:2] == here[:2]]:
            return None if here[3] in (None, met[-1]) or met[-1] is None else ("transform", here[3], met[-1])
        if self.begun[0][:2] != other.begun[0][:2]:
            here, there = self.begun[0], other.begun[0]
        elif other.is_behind(self) or (len(other.begun) == _MOST_BEGUN and here[:2] < other.begun[1][:2]):
            return None
        return ("epoch", here[0], there[0]) if here[0] != there[0] else ("consumed", here[1], there[1])

    def is_behind(self, other: Sheet) -> bool:
        return bool(self.begun[-1][:2] < other.begun[-1][:2] or self.begun[-1][2] < other.begun[-1][2])


class Agreement:
    """Compares this process's n-th loader of a split with the n-th loaders of other ranks. To be used by one thread."""

    def __init__(self, world: World, split: str) -> None:
        self._world, alike = world, (split, world.rank, world.world_size)
        self._key = f"{world.world_size} {split} {_NUMBERS[alike]}" if world.world_size > 1 else ""
        _NUMBERS[alike] += 1
        self._begun: list[list[Any]] = []

    def check(self, position: Position, pipeline: Pipeline) -> None:
        """Raises LaunchError if another rank reads something else than the epoch that this rank is about to begin."""
        if not check_world(self._world) or not self._key:
            return
        here = [*position.next[:2], position.num_loaded, pipeline.transform.description]
        if here not in self._begun[-1:]:
            self._begun = [*self._begun[:1], *self._begun[1:][2 - _MOST_BEGUN :], here]
        sampler, state = position.sampler, position.state()
        state = {"batch_size": sampler.batch_size, "tail": sampler.tail, "epoch_batches": sampler.length, **state}
        state["sets"] = [{**one, "before": 0} for one in state.get("sets", ())]
        reads = {name: state[name] for name in state if name not in (*Place._fields, "since", "num_samples")}
        sheet = json.dumps(Sheet(self._world.rank, reads, self._begun))
        found: list[tuple[int, str, Any, Any]] = []
        until = time.monotonic() + LIMIT_SECONDS
        while True:
            # In a thread, as a store may wait for its server. After an error of the store, nothing is compared.
            thread = DaemonThread(partial(_exchange, self._key, sheet, found), "shardio-agree")
            thread.begin()
            try:
                thread.wait(LIMIT_SECONDS)
            except queue.Empty:
                self._key = ""  # it will not be asked again
            if not found:
                return
            rank, name, mine, theirs = found.pop()
            if name not in ("epoch", "consumed", "transform") or time.monotonic() > until:
                raise LaunchError(
                    f"expected the same {name} on all ranks, found {show(theirs)} on rank {rank} and {show(mine)} on "
                    f"rank {self._world.rank}: give all ranks the same arguments, state and epoch. A loader of one "
                    "rank alone wants rank=0, world_size=1"
                )
            time.sleep(0.05)


def _exchange(key: str, text: str, found: list[tuple[int, str, Any, Any]]) -> None:
    """Compares the sheet `text`, JSON, with the sheet under `key` in the store. If they differ, appends (other rank,
    name, own value, other value) to `found`. If not, replaces a stored sheet that is behind by `text`."""
    store, mine, there = store_of_torch("loaders"), Sheet(*json.loads(text)), ""
    while (answer := store.compare_set(key, there, text).decode()) not in (text, there):
        theirs, there = Sheet(*json.loads(answer)), answer
        if theirs.rank != mine.rank:
            if difference := mine.difference(theirs):
                found.append((theirs.rank, *difference))
            if difference or not theirs.is_behind(mine):
                return
