"""Ranks that read other samples than each other are told at the first batch of an epoch, through torch's store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardio import BlockShuffle, ShardLoader, ShardWriter
from shardio.augment import CenterCrop, RandomCrop
from shardio.errors import LaunchError
from shardio.loading import agree, world
from shardio.loading.world import World

NUM_SAMPLES = 48
SHAPE = (6, 5, 3)


class Job:
    """Ranks in one process. What a rank does, it does as its torch.distributed says who it is."""

    def __init__(self, make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        self._make_set, self.loaders = make_set, ExitStack()
        self._me = World(0, 1, None, "default")
        self.store: Any = torch.distributed.HashStore()
        monkeypatch.setattr(agree, "_NUMBERS", Counter())
        monkeypatch.setattr(agree, "LIMIT_SECONDS", 0.2)
        monkeypatch.setattr(world, "world_of_torch", lambda *_: self._me)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: self.store)

    def loader(self, rank: int = 0, *, ranks: int = 2, num_samples: int = NUM_SAMPLES, **options: Any) -> ShardLoader:
        options = {"device": "cpu", "num_threads": 1, "batch_size": 4, "rank": rank, "world_size": ranks, **options}
        path = options.pop("path", None) or self._make_set(num_samples, SHAPE)
        return self.loaders.enter_context(ShardLoader(path, **options))

    def begins(self, loader: ShardLoader, rank: int | None = None) -> None:
        self._me = World(loader.world.rank if rank is None else rank, 2, None, "torch.distributed")
        list(islice(loader, 2))  # a single batch after a load would begin at the loaded place again


@pytest.fixture
def job(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(make_set, monkeypatch)
    with job.loaders:
        yield job


@pytest.mark.parametrize(
    ("name", "options", "others"),
    [
        ("seed", {"seed": 0}, {"seed": 1}),
        ("indices", {"indices": range(30)}, {"indices": range(1, 31)}),
        ("weights", {}, {"weights": np.ones(48)}),
        ("shuffle", {}, {"shuffle": False}),
        ("block_size", {"shuffle": "block"}, {"shuffle": BlockShuffle(4)}),
        ("batch_size", {"batch_size": 4}, {"batch_size": 5}),
        ("tail", {}, {"tail": "pad"}),
        ("epoch_batches", {}, {"epoch_batches": 5}),
        ("repeats", {}, {"repeats": 2}),
        ("digest", {}, {"num_samples": 47}),
        ("transform", {"transform": CenterCrop(4)}, {"transform": RandomCrop(4)}),
    ],
)
def test_a_rank_with_another_argument_is_told_the_rank_and_the_argument(
    name: str, options: dict[str, Any], others: dict[str, Any], job: Job
) -> None:
    job.begins(job.loader(0, **options))
    with pytest.raises(LaunchError, match=f"the same {name} on all ranks, .* on rank 0 and .* on rank 1"):
        job.begins(job.loader(1, **others))


@pytest.mark.parametrize(
    "options",
    [
        {"return_indices": True, "transform": lambda images: images},
        {"transform": CenterCrop(4), "prefetch": 0},
        {"shuffle": False, "seed": 5},
    ],
)
def test_what_decides_about_no_sample_may_differ(options: dict[str, Any], job: Job) -> None:
    job.begins(job.loader(0, shuffle=options.get("shuffle", True)))
    job.begins(job.loader(1, **options))


STATE = {"epoch": 3, "consumed": 16}


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        # A rank begins an epoch, or loads a state, or sets an epoch.
        (["0 load", "0", "1"], "epoch"),
        (["1", "0 load", "0"], "epoch"),
        (["0 set 3", "0", "1"], "epoch"),
        (["0", "1", "0 set 5", "0", "1"], "epoch"),
        (["0", "1", "0 load", "0", "1"], "epoch"),
        (["0 set 3", "1 load", "0", "1"], "consumed"),
        (["0 load", "1 load", "0", "1", "1", "0"], ""),
        # One is late.
        (["0"] * 40 + ["1"] * 40, ""),
        (["0", "1", "0", "0", "1", "0", "1", "1"], ""),
        # A picture on rank 0, whose epoch is begun again.
        (["0", "0 set 0", "0", "1", "1", "0"], ""),
        # Back to an earlier state.
        (["0", "1", "0 set 9", "1 set 9", "0", "1", "1 load", "1", "0 load", "0", "0", "1"], ""),
    ],
)
@pytest.mark.parametrize("options", [{}, {"epoch_batches": 5}])
def test_ranks_at_places_where_the_others_will_not_come_are_told(
    steps: list[str], name: str, options: dict[str, Any], job: Job
) -> None:
    loaders = [job.loader(rank, **options) for rank in range(2)]
    for number, (rank, *words) in enumerate(step.split() for step in steps):
        loader = loaders[int(rank)]
        match words:
            case ["load"]:
                loader.load_state_dict({**loader.state_dict(), **STATE})
            case ["set", epoch]:
                loader.set_epoch(int(epoch))
            case _ if name and number == len(steps) - 1:
                with pytest.raises(LaunchError, match=f"the same {name} on all ranks"):
                    job.begins(loader)
                loader.load_state_dict({**loader.state_dict(), **STATE})
            case _:
                job.begins(loader)


def test_mixtures_have_the_same_shares_on_all_ranks_and_may_change_them(
    job: Job, make_set: Callable[..., Path]
) -> None:
    def mixture(rank: int, *shares: int, **options: Any) -> ShardLoader:
        path = {make_set(20 + number, SHAPE): share for number, share in enumerate(shares)}
        return job.loader(rank, path=path, epoch_batches=3, **options)

    job.begins(mixture(0, 1, 3))
    with pytest.raises(LaunchError, match="the same sets on all ranks"):
        job.begins(mixture(1, 1, 2))
    old, new = mixture(0, 1, 1, ranks=1), [mixture(rank, 1, 3) for rank in range(2)]
    job.begins(old, rank=0)
    for loader in (*reversed(new), *new):
        job.begins(loader)
        loader.load_state_dict(old.state_dict())


def test_a_rank_may_come_from_another_place_while_this_rank_waits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "LIMIT_SECONDS", 10)
    first, second = (job.loader(rank) for rank in range(2))
    job.begins(first)  # a picture, before the state is loaded
    for loader in (first, second):
        loader.load_state_dict({**loader.state_dict(), **STATE})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.begins, second)
        time.sleep(0.3)
        assert not waiting.done()
        job.begins(first)
        waiting.result(10)


def test_loaders_are_paired_by_split_and_number_among_those_of_the_group(job: Job, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "both", SHAPE, classes=["a"]) as writer:
        for split in ["train", "val"] * 9:
            writer.append(np.zeros(SHAPE, np.uint8), 0, split=split)
    alone = job.loader(0, ranks=1, seed=9)
    job.begins(alone, rank=0)
    for rank in range(2):
        first, second = (job.loader(rank, seed=seed) for seed in range(2))
        if rank == 0:  # and rank 1 has neither
            job.begins(job.loader(0, path=tmp_path / "both", split="val", seed=3))
            job.begins(job.loader(0, seed=4))
        for loader in (second, first):
            job.begins(loader)
    with pytest.raises(LaunchError, match=r"the same seed .* alone wants rank=0, world_size=1"):
        job.begins(job.loader(1, seed=5))


def test_ranks_that_torchrun_starts_again_begin_anew(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begins(job.loader(0, seed=1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(agree, "_NUMBERS", Counter())
    job.begins(job.loader(1, seed=2))


def test_a_store_that_does_not_answer_is_asked_once_and_not_waited_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[threading.Thread] = []
    answer = threading.Event()
    store = SimpleNamespace(compare_set=lambda *_: asked.append(threading.current_thread()) or answer.wait(10))
    monkeypatch.setattr(agree, "store_of_torch", lambda prefix: store)
    loader = job.loader()
    start = time.monotonic()
    for _ in range(3):
        job.begins(loader)
    assert 0.2 <= time.monotonic() - start < 5
    answer.set()
    (thread,) = asked
    thread.join()


def test_without_a_store_nothing_is_compared(job: Job) -> None:
    job.store = None
    job.begins(job.loader())
