"""The samples as a torch Dataset, and a ShardLoader in the place of torch's DataLoader, with what such code reads."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import sample_pixels
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.loading.options import _INSTEAD

NUM_SAMPLES = 23
SHAPE = (6, 5, 3)
CHOSEN = [22, 3, 3, 7, 0, 11]
MakeLoader = Callable[..., ShardLoader]


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, 10)


def picture(i: int) -> torch.Tensor:
    return torch.from_numpy(sample_pixels(i, SHAPE)).permute(2, 0, 1)


def invert(image: torch.Tensor) -> torch.Tensor:
    """A function of the module, so that spawned workers find it."""
    return 255 - image


def test_many_samples_come_with_one_gather(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardDataset(path)
    calls: list[int] = []
    gather = dataset.shards.gather
    monkeypatch.setattr(dataset.shards, "gather", lambda wanted, out: (calls.append(len(wanted)), gather(wanted, out)))
    for indices in ([22, 0, 9, 10, 0], [5], [], list(range(NUM_SAMPLES)), np.array([3, 1]), torch.tensor([20, 2])):
        samples = dataset.__getitems__(indices)  # type: ignore[arg-type]
        wanted = [int(i) for i in indices]
        assert [label for _, label in samples] == [i % 7 for i in wanted]
        for (image, _), i in zip(samples, wanted, strict=True):
            assert torch.equal(image, picture(i))
    assert calls == [5, 1, 0, NUM_SAMPLES, 2, 2]


def test_images_are_copies(path: Path) -> None:
    dataset = ShardDataset(path)
    first, second = (image for image, _ in dataset.__getitems__([4, 4]))
    first.fill_(0)
    assert torch.equal(second, picture(4))
    assert torch.equal(dataset[4][0], picture(4))


@pytest.mark.parametrize("name", ["transform", "target_transform"])
def test_a_stop_iteration_of_a_function_is_an_error_and_loses_no_samples(name: str, path: Path) -> None:
    dataset = ShardDataset(path, **{name: lambda _: next(iter(()))})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(dataset, 4))


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (4, "RGBA")])
def test_images_are_pils_if_asked_for(channels: int, mode: str, make_set: Callable[..., Path]) -> None:
    shape = (6, 5, channels)
    dataset = ShardDataset(make_set(NUM_SAMPLES, shape), as_pil=True)
    for i in (0, 22):
        image, label = pickle.loads(pickle.dumps(dataset))[i]
        assert isinstance(image, Image.Image)
        assert (image.mode, image.size) == (mode, (5, 6))
        assert np.array_equal(np.asarray(image).reshape(shape), sample_pixels(i, shape))
        assert label == i % 7
        image.putpixel((0, 0), (1,) * channels)  # it is the caller's own
    dataset.transform = lambda image: image.size
    assert dataset[3] == ((5, 6), 3)
    with pytest.raises(ValueError, match=r"as_pil.* 5 channels"):
        ShardDataset(make_set(3, (2, 2, 5)), as_pil=True)


def test_it_has_what_users_of_imagefolder_look_for(path: Path) -> None:
    dataset = ShardDataset(path, "train", None, lambda label: f"label {label}")
    assert dataset.targets == [i % 7 for i in range(NUM_SAMPLES)]
    assert dataset.targets is dataset.targets
    assert dataset.class_to_idx == {f"c{i}": i for i in range(7)}
    assert dataset[9][1] == "label 2"
    dataset.target_transform = None
    data = pickle.dumps(dataset)
    assert len(data) < 2000  # no pixels, no mappings
    assert "targets" not in dataset.__getstate__()  # which a worker makes anew if it wants them
    again = pickle.loads(data)
    assert again.shards is not dataset.shards
    assert again.targets == dataset.targets


# torch and numpy have threads of their own, and Python from 3.12 on warns of forking with any.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_under_a_data_loader_with_workers(path: Path, context: str) -> None:
    loader = DataLoader(
        ShardDataset(path, transform=invert),
        batch_size=5,
        num_workers=2,
        multiprocessing_context=context,
        timeout=60,
        # One set of workers for both epochs: the second must not need the first's mapping.
        persistent_workers=True,
    )
    expected = torch.stack([255 - picture(i) for i in range(NUM_SAMPLES)])
    for _ in range(2):
        images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert torch.equal(images, expected)
        assert torch.equal(labels, torch.arange(NUM_SAMPLES) % 7)
    del loader
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(20)  # it closes a pipe of torch's queues
    gc.collect()


@pytest.fixture
def loader_of(make_set: Callable[..., Path]) -> MakeLoader:
    return lambda batch_size=4, **options: ShardLoader(
        make_set(NUM_SAMPLES, SHAPE), batch_size, **{"device": "cpu", "num_threads": 1, **options}
    )


@pytest.mark.parametrize("indices", [None, CHOSEN])
def test_the_dataset_has_the_samples_that_an_epoch_is_drawn_from(
    indices: list[int] | None, loader_of: MakeLoader
) -> None:
    there = list(range(NUM_SAMPLES)) if indices is None else indices
    with loader_of(indices=indices) as loader:
        assert loader.batch_sampler is None
        dataset = loader.dataset
        assert isinstance(dataset, Dataset)
        assert dataset is loader.dataset
        assert len(DataLoader(dataset, loader.batch_size, drop_last=True)) == len(loader)
        assert len(dataset) == len(there)
        assert dataset.targets == [i % 7 for i in there]
        for position, i in enumerate(there):
            for index in (position, position - len(there)):
                image, label = dataset[index]
                assert torch.equal(image, picture(i))
                assert (label, type(label)) == (i % 7, int)
        assert [label for _, label in dataset] == dataset.targets
        for index in (len(there), -len(there) - 1):
            with pytest.raises(IndexError, match=f"index {index} is out of range"):
                dataset[index]
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again) == len(dataset)
    assert next(iter(DataLoader(Subset(again, [0, 2]), 2)))[1].tolist() == [there[0] % 7, there[2] % 7]


def test_a_transform_of_the_dataset_would_do_nothing_and_is_an_error(loader_of: MakeLoader) -> None:
    with loader_of() as loader:
        for name in ("transform", "target_transform", "transforms"):
            assert getattr(loader.dataset, name, None) is None
            with pytest.raises(AttributeError, match=f"{name}: .* set the loader's transform instead"):
                setattr(loader.dataset, name, abs)


@pytest.mark.parametrize(("tail", "rank", "world_size"), [("drop", 0, 1), ("pad", 2, 3), ("short", 2, 3)])
def test_the_sampler_gives_the_indices_of_the_batches_that_come(
    tail: str, rank: int, world_size: int, loader_of: MakeLoader
) -> None:
    with loader_of(3, tail=tail, rank=rank, world_size=world_size, return_indices=True) as loader:
        for _ in range(3):
            coming = list(loader.sampler)
            assert len(coming) == len(loader.sampler)
            assert coming == [i for _, _, indices in loader for i in indices.tolist()]
        loader.sampler.set_epoch(1)
        assert iter(loader).epoch == 1
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        loader.sampler.set_epoch(1)  # the one that is under way
        rest = list(loader.sampler)
        assert rest == [i for _, _, indices in loader for i in indices.tolist()]


def test_an_argument_of_a_loader_that_is_set_later_is_an_error(loader_of: MakeLoader) -> None:
    with loader_of() as loader:
        for name in inspect.signature(ShardLoader).parameters.keys() - {"transform"}:
            with pytest.raises(AttributeError, match=f"{name} .*make another loader"):
                setattr(loader, name, 7)


def test_a_subclass_of_a_loader_may_have_attributes_of_its_own(make_set: Callable[..., Path]) -> None:
    class Own(ShardLoader):
        def __init__(self, path: Path) -> None:
            self.seed = 7
            super().__init__(path, 4, device="cpu")

    with Own(make_set(8)) as loader:
        assert loader.seed == 7


def test_every_argument_of_a_data_loader_is_named_with_what_to_use_instead(loader_of: MakeLoader) -> None:
    ours = {
        "drop_last": "tail=",
        "generator": "seed=",
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
    theirs = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset", "batch_size", "shuffle"}
    assert theirs <= set(_INSTEAD)
    assert not set(_INSTEAD) & set(inspect.signature(ShardLoader).parameters)


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"shuffle": True}])
def test_a_data_loader_around_a_loader_is_told_to_be_left_out(options: dict[str, Any], loader_of: MakeLoader) -> None:
    with loader_of() as loader, pytest.raises(TypeError, match="do not wrap it in a DataLoader, or wrap a"):
        next(iter(DataLoader(loader, **options)))  # type: ignore[arg-type]


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


def test_loaders_sets_datasets_and_samples_say_what_they_are_in_one_line(loader_of: MakeLoader, tmp_path: Path) -> None:
    loader = loader_of(4, rank=1, world_size=2, tail="short")
    path = loader.shards.path
    text = f"<ShardLoader {path}, train: 3 batches of 4 x {SHAPE}, rank 1 of 2, on cpu"
    assert repr(loader) == text + ">"
    loader.close()
    assert repr(loader) == text + ", closed>"
    dataset = ShardDataset(path)
    text = f"<ShardSet {path}, train: 23 samples of (6, 5, 3), 7 classes, digest {dataset.shards.digest[:12]}>"
    assert repr(dataset.shards) == text
    assert repr(dataset) == f"<ShardDataset of {text}>"
    (tmp_path / "a\n\x1b[31m").symlink_to(dataset.path)
    assert "\\n\\x1b[31m" in repr(ShardDataset(tmp_path / "a\n\x1b[31m"))
    assert repr(dataset.shards[9]) == "Sample(image=uint8 (6, 5, 3), label=2 'c2')"
