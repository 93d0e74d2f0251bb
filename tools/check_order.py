"""Checks what each rank reads, in every small case and in many large ones: the long form of the tests of order.

    python tools/check_order.py --exhaustive 64 8 9     every number of samples, ranks, batch size up to these
    python tools/check_order.py --random 10000          larger cases at random
    python tools/check_order.py --resume 500            jobs that stop and go on with other ranks and batch sizes
    python tools/check_order.py --mixtures 10000        mixtures that stop and go on with other sets and shares, too

All four if none is named. A case that fails is printed, with the seed, and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.loading.mixture import Part
from shardio.order.orders import BlockShuffle, Order, WeightedDraws, make_order
from shardio.order.sampler import Sampler, Tail

TAILS: tuple[Tail, ...] = get_args(Tail)
EPOCH = 3
JOB_SAMPLES = 400
JOB_SIZES = (8, 3, 24)
MIXED_SIZES = (5, 17, 40, 101)

# Every way of ordering an epoch of n samples, from a seed.
ORDERS: dict[str, Callable[[int, int], Order]] = {
    "stored": lambda n, seed: make_order(n, shuffle=False),
    "global": lambda n, seed: make_order(n, seed=seed),
    "block": lambda n, seed: make_order(n, seed=seed, shuffle=BlockShuffle(3, 2)),
    "large block": lambda n, seed: make_order(n, seed=seed, shuffle="block"),
    "subset": lambda n, seed: make_order(2 * n, seed=seed, indices=np.arange(n) * 2),
    "weighted": lambda n, seed: WeightedDraws(np.arange(9.0), seed, n),
}


def check_epoch(order: Order, batch_size: int, world_size: int, tail: Tail) -> None:
    """Checks all that is promised of one epoch, over all ranks. AssertionError names the case."""
    n = order.num_samples
    case = f"{order} {batch_size=} {world_size=} {tail=}"
    samplers = [Sampler(order, batch_size, rank, world_size, tail) for rank in range(world_size)]
    ranks = [list(sampler.batches(EPOCH)) for sampler in samplers]
    global_size = batch_size * world_size
    full, rest = divmod(n, global_size)
    num_steps = full + (rest > 0 and tail != "drop")
    assert {sampler.global_batch_size for sampler in samplers} == {global_size}, case
    assert {sampler.num_batches for sampler in samplers} == {num_steps}, case
    assert {len(batches) for batches in ranks} == {num_steps}, case

    whole = order(EPOCH, np.arange(n))
    length = n if tail == "short" else num_steps * global_size
    expected = np.resize(whole, length)  # cut, or from its beginning again
    alone = list(Sampler(order, global_size, tail=tail).batches(EPOCH))
    assert len(alone) == num_steps, case
    for step in range(num_steps):
        parts = [batches[step] for batches in ranks]
        together = np.concatenate(parts)
        assert together.dtype == np.int64, case
        assert np.array_equal(together, expected[step * global_size : (step + 1) * global_size]), (case, step)
        assert np.array_equal(together, alone[step]), (case, step)
        sizes = {len(part) for part in parts}
        if step < full or tail == "pad":
            assert sizes == {batch_size}, (case, step)
        else:
            assert max(sizes) - min(sizes) <= 1, (case, step)
            assert max(sizes) <= batch_size, (case, step)
    repeats = sum(sampler.num_padded(step) for sampler in samplers for step in range(num_steps))
    assert repeats == max(0, length - n), case


def check_cover(order: Order) -> None:
    """Checks that an epoch has each sample exactly once, and that each position can be computed alone."""
    n = order.num_samples
    whole = order(EPOCH, np.arange(n))
    assert np.array_equal(np.sort(whole), np.sort(order_members(order))), order
    backwards = np.arange(n)[::-1]
    assert np.array_equal(order(EPOCH, backwards), whole[::-1]), order
    for position in {0, n // 3, n - 1}:
        assert order(EPOCH, np.array([position])) == whole[position], (order, position)


def order_members(order: Order) -> NDArray[np.int64]:
    indices: NDArray[np.int64] = getattr(order, "indices", np.arange(order.num_samples))
    return indices


def check_exhaustively(most_samples: int, most_ranks: int, most_batch: int) -> Iterator[int]:
    """Checks every case up to these. Yields the number of cases done."""
    done = 0
    for n, (name, make) in product(range(1, most_samples + 1), ORDERS.items()):
        order = make(n, n)
        if name != "weighted":
            check_cover(order)
        for world_size, batch_size, tail in product(range(1, most_ranks + 1), range(1, most_batch + 1), TAILS):
            check_epoch(order, batch_size, world_size, tail)
            done += 1
        yield done


def check_at_random(count: int, seed: int) -> Iterator[int]:
    """Checks `count` larger cases. Yields the number of cases done."""
    rng = np.random.default_rng(seed)
    for done in range(1, count + 1):
        n = int(10 ** rng.uniform(1, 5))
        name = str(rng.choice(list(ORDERS)))
        order = ORDERS[name](n, int(rng.integers(1 << 63)))
        if name != "weighted":
            check_cover(order)
        check_epoch(order, int(10 ** rng.uniform(0, 3)), int(rng.integers(1, 33)), TAILS[done % 3])
        yield done


def run_resized_job(out: Path, seed: int) -> int:
    """Reads one epoch of real loaders by a job that stops and goes on with other ranks and batch sizes.

    Returns how often it went on. AssertionError unless what was read, step by step, is the order of a loader alone.
    """
    rng = np.random.default_rng(seed)
    n = JOB_SAMPLES
    modes: list[dict[str, Any]] = [
        {},
        {"shuffle": False},
        {"shuffle": BlockShuffle(int(rng.integers(1, 20)), int(rng.integers(1, 9)))},
        {"indices": rng.permutation(n)[: int(rng.integers(50, n))]},
        {"weights": rng.random(n)},
    ]
    options: dict[str, Any] = {
        "seed": seed,
        "tail": "short",
        "device": "cpu",
        "num_threads": 1,
        "return_indices": True,
        "prefetch": 1,
    }
    options |= modes[seed % len(modes)]
    with ShardLoader(out, 1, **options) as alone:
        expected = [index for batch in alone for index in batch[2].tolist()]
    read: list[int] = []
    state, stages = "", 0
    while len(read) < len(expected):
        world_size = JOB_SIZES[stages] if stages < len(JOB_SIZES) else int(rng.integers(1, 25))
        batch_size = int(rng.integers(1, 6))
        with ExitStack() as stack:
            loaders = [
                stack.enter_context(ShardLoader(out, batch_size, rank=rank, world_size=world_size, **options))
                for rank in range(world_size)
            ]
            if state:
                for loader in loaders:
                    loader.load_state_dict(json.loads(state))
            iterators = [iter(loader) for loader in loaders]
            for _ in range(min(int(rng.integers(1, 6)), len(iterators[0]))):
                for iterator in iterators:
                    _, labels, indices = next(iterator)
                    assert labels.equal(indices), f"{seed=}"
                    read += indices.tolist()
            states = {json.dumps(loader.state_dict()) for loader in loaders}
        assert len(states) == 1, f"{seed=}: the ranks are not at the same place: {states}"
        state = states.pop()
        stages += 1
    assert read == expected, f"{seed=} {options}"
    return stages


def check_resumed_jobs(count: int, seed: int) -> Iterator[int]:
    """Does `count` jobs of `run_resized_job`. Yields the number of jobs done."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        with ShardWriter(out, (2, 2, 3), shard_nbytes=4096 + 12 * 50) as writer:
            for i in range(JOB_SAMPLES):
                writer.append(np.full((2, 2, 3), i % 256, np.uint8), i)
        for done in range(1, count + 1):
            run_resized_job(out, seed + done)
            yield done


class MixedJob:
    """A job that reads a mixture, is killed, and goes on with other ranks, batch sizes, shares and sets, several times.

    It checks that each set gives its samples once per pass, in one order, and that each has had its share to within one
    since the shares were changed last. AssertionError names the seed.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.seed, self.folder = random.Random(seed), seed, folder
        self.read: dict[int, list[int]] = {}  # what each set has given since it was added
        self.since: dict[int, int] = {}  # how many samples of each since the shares were changed
        self.shares: tuple[tuple[int, int], ...] = ()
        self.repeats, self.epoch_batches = self.rng.choice([1, 1, 2, 3]), self.rng.randint(1, 9)
        self.sets: dict[int, int] = {}

    def draw_sets(self) -> None:
        """Adds sets, or leaves some out, or draws other shares."""
        rng = self.rng
        names = list(self.sets) or rng.sample(range(len(MIXED_SIZES)), rng.randint(1, 4))
        if self.sets and rng.random() < 0.5 and len(names) < len(MIXED_SIZES):
            names.append(rng.choice([name for name in range(len(MIXED_SIZES)) if name not in names]))
        elif self.sets and rng.random() < 0.5 and len(names) > 1:
            names.remove(rng.choice(names))
        rng.shuffle(names)
        if set(names) != set(self.sets) or rng.random() < 0.3:
            self.sets = {name: rng.randint(0, 6) for name in names}
            self.sets[names[0]] = rng.randint(1, 6)
        for name in [name for name in self.read if name not in self.sets]:
            del self.read[name]

    def stage(self, state: str) -> str:
        """Reads some batches by some ranks. Returns the state to go on from."""
        rng = self.rng
        self.draw_sets()
        world_size = rng.choice([1, 2, 3, 4])
        size = rng.randint(1, 3) * self.repeats
        options: dict[str, Any] = {"epoch_batches": self.epoch_batches, "repeats": self.repeats, "seed": self.seed}
        options |= {"device": "cpu", "num_threads": 1, "prefetch": rng.randint(0, 2), "return_indices": True}
        parts = [Part(self.folder / str(name), share) for name, share in self.sets.items()]
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(ShardLoader(parts, size, rank=rank, world_size=world_size, **options))
                for rank in range(world_size)
            ]
            for loader in ranks:
                if state:
                    loader.load_state_dict(json.loads(state))
            for left in reversed(range(rng.randint(1, 3))):
                for batches in zip(*ranks, strict=True):
                    self.check(batches, size)
                    if not left and rng.random() < 0.3:  # killed in mid-epoch
                        break
            states = {json.dumps(loader.state_dict()) for loader in ranks}
        assert len(states) == 1, f"seed={self.seed}: the ranks are not at the same place: {states}"
        return states.pop()

    def check(self, batches: Any, size: int) -> None:
        """Compares a global batch with what came before."""
        names = list(self.sets)
        divisor = math.gcd(*self.sets.values())
        exact = tuple((name, share // divisor) for name, share in sorted(self.sets.items()))
        if exact != self.shares:
            self.shares, self.since = exact, dict.fromkeys(names, 0)
        sources = [int(source) for batch in batches for source in batch[3]["source"]]
        drawn = list(zip(sources, (int(label) for batch in batches for label in batch[1]), strict=True))
        assert len(drawn) == size * len(batches), f"seed={self.seed}"
        distinct = len(drawn) // self.repeats
        for copy in range(self.repeats):
            assert drawn[copy * distinct : (copy + 1) * distinct] == drawn[:distinct], f"seed={self.seed}: repeats"
        for source, number in drawn[:distinct]:
            name = names[source]
            self.read.setdefault(name, []).append(number)
            self.since[name] += 1
        count, total = sum(self.since.values()), sum(share for _, share in exact)
        for name, share in exact:
            assert abs(self.since[name] * total - count * share) < total, f"seed={self.seed}: share of {name}"
        for name, numbers in self.read.items():
            for first in range(0, len(numbers), MIXED_SIZES[name]):
                some = numbers[first : first + MIXED_SIZES[name]]
                assert len(set(some)) == len(some), f"seed={self.seed}: a sample of {name} came twice in a pass"
                assert len(some) < MIXED_SIZES[name] or sorted(some) == list(range(MIXED_SIZES[name])), self.seed


def check_mixtures(count: int, seed: int) -> Iterator[int]:
    """Does `count` jobs of several stages. Yields the number of jobs done."""
    with tempfile.TemporaryDirectory() as folder:
        for name, size in enumerate(MIXED_SIZES):
            with ShardWriter(Path(folder, str(name)), (1, 1, 1)) as writer:
                for number in range(size):
                    writer.append(np.full((1, 1, 1), name, np.uint8), number)
        for done in range(1, count + 1):
            job, state = MixedJob(Path(folder), seed + done), ""
            for _ in range(job.rng.randint(2, 4)):
                state = job.stage(state)
            yield done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exhaustive", type=int, nargs=3, metavar=("SAMPLES", "RANKS", "BATCH"))
    parser.add_argument("--random", type=int, metavar="CASES")
    parser.add_argument("--resume", type=int, metavar="JOBS")
    parser.add_argument("--mixtures", type=int, metavar="JOBS")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.exhaustive is given.random is given.resume is given.mixtures is None:
        given.exhaustive, given.random, given.resume, given.mixtures = (64, 8, 9), 10_000, 500, 10_000
    runs: dict[str, tuple[Iterator[int], int | None]] = {}
    if given.exhaustive:
        runs["exhaustive cases"] = check_exhaustively(*given.exhaustive), None
    if given.random:
        runs["random cases"] = check_at_random(given.random, given.seed), given.random
    if given.resume:
        runs["resumed jobs"] = check_resumed_jobs(given.resume, given.seed), given.resume
    if given.mixtures:
        runs["mixed jobs"] = check_mixtures(given.mixtures, given.seed), given.mixtures
    for name, (run, total) in runs.items():
        start, done = time.perf_counter(), 0
        with tqdm(desc=name, total=total, disable=None) as bar:
            try:
                for done in run:
                    bar.update(done - bar.n)
            except AssertionError as error:
                sys.exit(f"{name}: FAILED after {done:,}, seed {given.seed}: {error}")
        print(f"{name}: {done:,} done, all exact, {time.perf_counter() - start:.0f} s, seed {given.seed}")


if __name__ == "__main__":
    main()
