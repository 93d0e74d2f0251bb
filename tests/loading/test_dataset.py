"""The samples as a torch Dataset, alone and under torch's own DataLoader."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import sample_pixels
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from shardio.errors import FormatError, SetNotFoundError
from shardio.loading.dataset import ShardDataset

NUM_SAMPLES = 23
SHAPE = (6, 5, 3)


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(NUM_SAMPLES, SHAPE, 10)


def picture(i: int) -> torch.Tensor:
    return torch.from_numpy(sample_pixels(i, SHAPE)).permute(2, 0, 1)


def invert(image: torch.Tensor) -> torch.Tensor:
    """A function of the module, so that spawned workers find it."""
    return 255 - image


def collate_with_worker(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    images, labels = default_collate(samples)
    return images, labels, os.getpid(), torch.utils.data.get_worker_info().num_workers


def test_every_sample_is_there(path: Path) -> None:
    dataset = ShardDataset(path)
    assert len(dataset) == NUM_SAMPLES
    assert dataset.classes == tuple(f"c{i}" for i in range(7))
    for i in range(NUM_SAMPLES):
        image, label = dataset[i]
        assert image.shape == (SHAPE[2], *SHAPE[:2])
        assert image.dtype == torch.uint8
        assert torch.equal(image, picture(i))
        assert type(label) is int
        assert label == i % 7
        assert torch.equal(dataset[i - NUM_SAMPLES][0], image)
    assert [label for _, label in dataset] == dataset.targets  # iterating ends


def test_indices_are_integers_of_samples_that_are_there(path: Path) -> None:
    dataset = ShardDataset(path)
    for index, error in ((NUM_SAMPLES, IndexError), (-NUM_SAMPLES - 1, IndexError), (1.0, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="index"):
            dataset[index]  # type: ignore[index]
    for indices, wrong in (([0, NUM_SAMPLES], IndexError), ([-1], IndexError), ([0.5, 1], ValueError)):
        with pytest.raises(wrong, match="indices"):
            dataset.__getitems__(indices)  # type: ignore[arg-type]


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
    image, _ = dataset[4]
    image.fill_(0)
    again, _ = dataset[4]
    assert torch.equal(again, picture(4))
    first, second = (image for image, _ in dataset.__getitems__([4, 4]))
    first.fill_(0)
    assert torch.equal(second, picture(4))


def test_transform_makes_of_each_image_what_it_likes(path: Path) -> None:
    dataset = ShardDataset(path, transform=lambda image: image.float().mean().item())
    for i in (0, 22):
        value, label = dataset[i]
        assert value == pytest.approx(float(sample_pixels(i, SHAPE).mean()))
        assert label == i % 7


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
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


def test_what_cannot_be_a_pil_image_is_refused_when_the_dataset_is_made(make_set: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="as_pil: expected samples of 1 to 4 channels, found 5"):
        ShardDataset(make_set(3, (2, 2, 5)), as_pil=True)


def test_it_has_what_users_of_imagefolder_look_for(path: Path) -> None:
    dataset = ShardDataset(path, "train", None, lambda label: f"label {label}")
    assert dataset.targets == [i % 7 for i in range(NUM_SAMPLES)]
    assert dataset.targets is dataset.targets
    assert dataset.class_to_idx == {f"c{i}": i for i in range(7)}
    assert dataset[9][1] == "label 2"
    dataset.target_transform = None
    assert "targets" not in dataset.__getstate__()  # which a worker makes anew if it wants them
    assert pickle.loads(pickle.dumps(dataset)).targets == dataset.targets


def test_a_pickled_dataset_opens_the_set_anew(path: Path) -> None:
    dataset = ShardDataset(path, transform=invert)
    data = pickle.dumps(dataset)
    assert len(data) < 2000  # no pixels, no mappings
    copy = pickle.loads(data)
    assert copy.shards is not dataset.shards
    assert (copy.path, copy.split, len(copy)) == (str(path), "train", NUM_SAMPLES)
    for i in range(NUM_SAMPLES):
        assert torch.equal(copy[i][0], 255 - picture(i))
    assert len(dataset) == NUM_SAMPLES  # pickling does not close the first


def test_a_pickled_dataset_of_a_lost_or_damaged_set_is_refused(path: Path) -> None:
    data = pickle.dumps(ShardDataset(path))
    shard = path / "train-00001.npy"
    nbytes = shard.stat().st_size
    os.truncate(shard, nbytes - 1)
    with pytest.raises(FormatError, match=rf"train-00001\.npy: expected {nbytes} bytes.* found {nbytes - 1}"):
        pickle.loads(data)
    (path / "manifest.json").unlink()
    with pytest.raises(SetNotFoundError, match=str(path)):
        pickle.loads(data)


# torch and numpy have threads of their own, and Python from 3.12 on warns of forking with any.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_under_a_data_loader_with_workers(path: Path, context: str) -> None:
    loader = DataLoader(
        ShardDataset(path, transform=invert),
        batch_size=5,
        num_workers=2,
        multiprocessing_context=context,
        collate_fn=collate_with_worker,
        timeout=60,
        # One set of workers for both epochs: the second must not need the first's mapping.
        persistent_workers=True,
    )
    workers = set()
    for _ in range(2):
        position = 0
        for images, labels, worker, num_workers in loader:
            assert num_workers == 2
            workers.add(worker)
            for image, label in zip(images, labels.tolist(), strict=True):
                assert torch.equal(image, 255 - picture(position))
                assert label == position % 7
                position += 1
        assert position == NUM_SAMPLES
    assert len(workers) == 2
    assert os.getpid() not in workers
    del loader, images, labels, image
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(20)  # it closes a pipe of torch's queues
    gc.collect()
