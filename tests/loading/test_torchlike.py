"""A ShardLoader in the place of torch's DataLoader: it has what such code reads, or names what to use instead."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import sample_pixels
from torch.utils.data import DataLoader, Dataset, Subset

from shardio import ShardDataset, ShardLoader
from shardio.loading.options import _INSTEAD

NUM_SAMPLES = 23
SHAPE = (6, 5, 3)
CHOSEN = [22, 3, 3, 7, 0, 11]
MakeLoader = Callable[..., ShardLoader]


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> MakeLoader:
    return lambda batch_size=4, **options: ShardLoader(
        make_set(NUM_SAMPLES, SHAPE), batch_size, **{"device": "cpu", "num_threads": 1, **options}
    )


# The dataset.


@pytest.mark.parametrize("indices", [None, CHOSEN])
def test_the_dataset_has_the_samples_that_an_epoch_is_drawn_from(
    indices: list[int] | None, loader_of: MakeLoader
) -> None:
    there = list(range(NUM_SAMPLES)) if indices is None else indices
    with loader_of(indices=indices) as loader:
        dataset = loader.dataset
        assert isinstance(dataset, Dataset)
        assert dataset is loader.dataset
        assert len(dataset) == len(there)
        assert dataset.classes == loader.shards.classes
        assert dataset.class_to_idx == {f"c{i}": i for i in range(7)}
        assert dataset.targets == [i % 7 for i in there]
        for position, i in enumerate(there):
            for index in (position, position - len(there)):
                image, label = dataset[index]
                assert torch.equal(image, torch.from_numpy(sample_pixels(i, SHAPE)).permute(2, 0, 1))
                assert label == i % 7
        assert [label for _, label in dataset] == dataset.targets
        for index in (len(there), -len(there) - 1):
            with pytest.raises(IndexError, match=f"index {index} is out of range"):
                dataset[index]


@pytest.mark.parametrize("indices", [None, CHOSEN])
def test_the_dataset_goes_under_a_data_loader_and_into_other_processes(
    indices: list[int] | None, loader_of: MakeLoader
) -> None:
    with loader_of(indices=indices) as loader:
        dataset = pickle.loads(pickle.dumps(loader.dataset))
        batches = list(DataLoader(Subset(dataset, [0, 2]), batch_size=2))
        assert batches[0][1].tolist() == [loader.dataset.targets[0], loader.dataset.targets[2]]
        assert len(dataset) == len(loader.dataset)


@pytest.mark.parametrize("name", ["transform", "target_transform", "transforms"])
def test_a_transform_of_the_dataset_would_do_nothing_and_is_an_error(name: str, loader_of: MakeLoader) -> None:
    with loader_of() as loader:
        assert getattr(loader.dataset, name, None) is None
        with pytest.raises(AttributeError, match=f"{name}: .* set the loader's transform instead"):
            setattr(loader.dataset, name, abs)


def test_a_loader_that_is_forgotten_ends_though_its_dataset_and_sampler_were_asked_for(loader_of: MakeLoader) -> None:
    loader = loader_of()
    dataset = loader.dataset
    assert len(loader.sampler) == 20
    threads = list(loader._pipeline._threads._threads)
    del loader
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    assert dataset[3][1] == 3


# The sampler, and sizes.


@pytest.mark.parametrize("tail", ["drop", "pad", "short"])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 3), (2, 3)])
def test_the_sampler_gives_the_indices_of_the_batches_that_come(
    rank: int, world_size: int, tail: str, loader_of: MakeLoader
) -> None:
    with loader_of(3, tail=tail, rank=rank, world_size=world_size, return_indices=True) as loader:
        for _ in range(3):
            coming = list(loader.sampler)
            assert len(coming) == len(loader.sampler)
            assert coming == [i for _, _, indices in loader for i in indices.tolist()]
        loader.sampler.set_epoch(1)
        assert iter(loader).epoch == 1
        first = next(iter(loader))
        state = loader.state_dict()
        loader.load_state_dict(state)
        loader.sampler.set_epoch(1)  # the one that is under way
        rest = list(loader.sampler)
        assert [*first[2].tolist(), *rest] == [*first[2].tolist(), *(i for b in loader for i in b[2].tolist())]


def test_sizes_are_those_of_a_data_loader(loader_of: MakeLoader) -> None:
    with loader_of(4) as loader:
        twin = DataLoader(loader.dataset, batch_size=4, drop_last=True)
        assert (loader.batch_size, len(loader), len(loader.dataset)) == (twin.batch_size, len(twin), NUM_SAMPLES)
        assert loader.batch_sampler is None


def test_the_loop_of_torchvisions_reference_finds_what_it_reads(loader_of: MakeLoader) -> None:
    """It does the same as references/classification/train.py: the sampler chooses an epoch, an evaluation counts."""
    with loader_of(shuffle=False, tail="short") as data_loader:
        num_classes = len(data_loader.dataset.classes)
        for epoch in range(2):
            data_loader.sampler.set_epoch(epoch)
            num_processed = 0
            for image, target in data_loader:
                assert int(target.max()) < num_classes
                num_processed += image.shape[0]
            assert hasattr(data_loader.dataset, "__len__")
            assert len(data_loader.dataset) == num_processed


# Arguments.


def test_every_argument_of_a_data_loader_is_named_with_what_to_use_instead(loader_of: MakeLoader) -> None:
    ours = {"num_workers": "num_threads=", "drop_last": "tail=", "generator": "seed=", "prefetch_factor": "prefetch="}
    ours |= {
        "num_replicas": "world_size=",
        "num_samples": "epoch_batches=",
        "collate_fn": "transform=",
        "sampler": "indices= and weights=",
        "pin_memory": "leave it out",
    }
    for name in _INSTEAD:
        with pytest.raises(TypeError, match=f"arguments of torch: {name}: .*{ours.get(name, '')}"):
            loader_of(**{name: None})
    with pytest.raises(TypeError, match=r"num_workers: use num_threads=.*; drop_last: use tail="):
        loader_of(num_workers=4, drop_last=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        loader_of(bogus=1)


def test_the_arguments_are_those_that_a_data_loader_has() -> None:
    import inspect

    theirs = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset", "batch_size", "shuffle"}
    assert theirs <= set(_INSTEAD)
    assert not set(_INSTEAD) & set(inspect.signature(ShardLoader).parameters)


needs_closed_pipes = pytest.mark.skipif(
    torch.__version__.startswith("2.4."), reason="torch 2.4 leaves pipes of a worker that has failed open"
)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": None}, {"shuffle": True}, pytest.param({"num_workers": 1}, marks=needs_closed_pipes)]
)
def test_a_data_loader_around_a_loader_is_told_to_be_left_out(
    options: dict[str, Any], loader_of: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long torch waits for the end of a worker that has failed.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    with loader_of() as loader:
        around: DataLoader[Any] = DataLoader(loader, **options)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="do not wrap it in a DataLoader, or wrap a ShardDataset"):
            next(iter(around))
    del around
    gc.collect()  # closes the pipes to workers that have ended


# Copies, and other processes.


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_and_its_iterators_are_not_copied_and_say_what_to_do(
    make: Callable[[Any], Any], loader_of: MakeLoader
) -> None:
    with loader_of() as loader:
        with pytest.raises(TypeError, match=r"cannot be pickled or copied: make it in the process that uses it"):
            make(loader)
        with pytest.raises(TypeError, match="cannot be pickled or copied: state_dict"):
            make(iter(loader))
        assert not loader.closed
        assert len(list(loader)) == len(loader)


# How objects show themselves.


def test_a_loader_says_what_it_is_in_one_line(loader_of: MakeLoader) -> None:
    loader = loader_of(4, rank=1, world_size=2, tail="short")
    path = loader.shards.path
    text = f"<ShardLoader {path}, train: 3 batches of 4 x {SHAPE}, rank 1 of 2, on cpu"
    assert repr(loader) == text + ">"
    loader.close()
    assert repr(loader) == text + ", closed>"


def test_sets_datasets_and_samples_say_what_they_are_in_one_line(make_set: Callable[..., Path], tmp_path: Path) -> None:
    path = make_set(NUM_SAMPLES, SHAPE)
    dataset = ShardDataset(path)
    text = f"<ShardSet {path}, train: 23 samples of (6, 5, 3), 7 classes, digest {dataset.shards.digest[:12]}>"
    assert repr(dataset.shards) == text
    assert repr(dataset) == f"<ShardDataset of {text}>"
    (tmp_path / "a\n\x1b[31m").symlink_to(dataset.path)
    assert "\\n\\x1b[31m" in repr(ShardDataset(tmp_path / "a\n\x1b[31m"))
    assert repr(dataset.shards[9]) == "Sample(image=uint8 (6, 5, 3), label=2)"
    image, label = dataset.shards[9]
    assert (np.array_equal(image, sample_pixels(9, SHAPE)), label) == (True, 2)
