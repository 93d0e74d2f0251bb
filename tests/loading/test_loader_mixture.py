"""Loaders of mixtures: the samples that the order says, from the sets that have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from check_order import check_mixtures
from folders import flip

from shardio import Mixture, Part, ShardLoader, ShardWriter, open_shards
from shardio.augment import Compose, HorizontalFlip, RandomResizedCrop
from shardio.errors import FormatError
from shardio.order.mixture import MixedOrder

SHAPE = (20, 16, 3)
CROPPED = Compose([RandomResizedCrop(12), HorizontalFlip()])
COUNTS = {"photos": 57, "drawn": 23, "few": 5}
SHARES = {"photos": 10, "drawn": 5, "few": 1}

Open = Callable[..., ShardLoader]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sets with the same classes, and a mask for each sample."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in COUNTS.items():
        write(folder / name, count)
    return folder


def write(out: Path, count: int, classes: tuple[str, ...] = ("cat", "dog"), **options: Any) -> Path:
    rng = np.random.default_rng(count)
    arrays = {"mask": ("mask", "uint8", SHAPE[:2]), "score": ("array", "float64", ())}
    options = {"classes": classes, "shard_nbytes": 4096 + 10 * 960, "arrays": arrays} | options
    with ShardWriter(out, SHAPE, **options) as writer:
        for number in range(count):
            image = rng.integers(0, 256, SHAPE, dtype=np.uint8)
            more = {"mask": image[..., 0], "score": number / 8} if options["arrays"] else {}
            label = number % max(1, len(classes))
            writer.append(image, label, key=f"{out.name}/{number}", **more)
    return out


@pytest.fixture
def mixed(folder: Path, closing: ExitStack) -> Open:
    def make(batch_size: int = 16, shares: Any = None, **options: Any) -> ShardLoader:
        sets = {str(folder / name): share for name, share in SHARES.items()} if shares is None else shares
        options = {"epoch_batches": 6, "device": "cpu", "num_threads": 2, "return_indices": True, "seed": 3, **options}
        return closing.enter_context(ShardLoader(sets, batch_size, **options))

    return make


def samples_of(loader: ShardLoader) -> list[tuple[int, int]]:
    """Returns (source, number in its set) of each sample of an epoch. Compares pixels, labels, masks and scores."""
    sets, starts = loader.shards.sets, loader.shards.starts  # type: ignore[union-attr]
    found = []
    for images, labels, indices, more in loader:
        for place, (index, source) in enumerate(zip(indices.tolist(), more["source"].tolist(), strict=True)):
            number = index - int(starts[source])
            sample = sets[source][number]
            assert np.array_equal(images[place].permute(1, 2, 0).numpy(), sample.image)
            assert labels[place] == sample.label
            if "mask" in more:
                assert np.array_equal(more["mask"][place].numpy(), sample.arrays["mask"])
                assert "score" not in more or more["score"][place] == number / 8
            found.append((source, number))
    return found


@pytest.mark.parametrize("options", [{}, {"transform": CROPPED}])
def test_batches_do_not_depend_on_ranks_readers_or_the_order_of_the_sets(
    options: dict[str, Any], folder: Path, mixed: Open
) -> None:
    def stream(loaders: list[ShardLoader]) -> list[bytes]:
        steps = zip(*loaders, strict=True)
        return [part[0][i].numpy().tobytes() for step in steps for part in step for i in range(len(part[0]))]

    whole = stream([mixed(**options)])
    assert len(set(whole)) > 60
    for names in (["few", "photos", "drawn"], ["drawn", "few", "photos"]):
        parts = [Part(folder / name, SHARES[name] * 0.1) for name in names]
        assert stream([mixed(shares=parts, **options)]) == whole
    for batch_size, world_size, io in ((8, 2, "pread"), (4, 4, "direct")):
        ranks = [
            mixed(batch_size, rank=r, world_size=world_size, io=io, check="sample", **options)
            for r in range(world_size)
        ]
        assert stream(ranks) == whole
    # Other epochs than those of 6 batches, and other batches.
    other = mixed(12, epoch_batches=8, **options)
    assert stream([other]) == whole


def test_a_mixture_gives_what_it_has_always_given(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("other", 2)):
        with ShardWriter(tmp_path / name, (1, 1, 1)) as writer:
            for number in range(9):
                writer.append(np.full((1, 1, 1), value, np.uint8), number)
    parts = [Part(tmp_path / "one", 2), Part(tmp_path / "other", 1, indices=range(1, 8))]
    with ShardLoader(parts, 12, epoch_batches=2, seed=11, device="cpu") as loader:
        found = ["".join(map(str, part.tolist())) for _, labels, more in loader for part in (more["source"], labels)]
    assert found == ["010001010001", "711624334587", "010001100001", "057532602161"]


def test_a_stream_goes_on_with_other_ranks_where_the_sets_are_now(folder: Path, tmp_path: Path, mixed: Open) -> None:
    first = mixed()
    samples_of(first)
    next(iterator := iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    moved = {str(shutil.copytree(folder / name, tmp_path / name)): share for name, share in SHARES.items()}
    ranks = [mixed(8, moved, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    for (expected, *_), (one, *_), (other, *_) in zip(iterator, *ranks, strict=True):
        assert torch.equal(torch.cat([one, other]), expected)


def test_mixtures_that_are_killed_and_changed_lose_and_repeat_no_sample() -> None:
    assert list(check_mixtures(8, seed=0)) == list(range(1, 9))


@pytest.mark.parametrize("careless", ["before", "since"])
def test_a_mixture_that_goes_on_elsewhere_would_be_noticed(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_sets = MixedOrder.describe_sets

    def wrong(order: MixedOrder) -> dict[str, Any]:
        told = describe_sets(order)
        if careless == "since":
            return {**told, "since": max(0, told["since"] - 1)}
        return {**told, "sets": [{**one, "before": one["before"] + 1} for one in told["sets"]]}

    monkeypatch.setattr(MixedOrder, "describe_sets", wrong)
    with pytest.raises(AssertionError, match="seed="):
        list(check_mixtures(25, seed=0))


def test_places_and_states_that_a_mixture_cannot_have_are_refused(folder: Path, mixed: Open) -> None:
    loader = mixed()
    samples_of(loader)
    state = loader.state_dict()
    other = mixed(shares={str(folder / "photos"): 1})
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="sample 96 of the stream on, but epoch 0"):
        other.set_epoch(0)
    with ShardLoader(folder / "photos", 4, device="cpu", epoch_batches=3, seed=3) as single:
        with pytest.raises(ValueError, match="state"):
            single.load_state_dict(state)
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict(single.state_dict())


def test_classes_are_the_same_or_joined_by_name_or_left_as_stored(tmp_path: Path, mixed: Open) -> None:
    one = write(tmp_path / "one", 8, ("cat", "dog"))
    other = write(tmp_path / "other", 9, ("cow", "dog", "ant"))
    shares = {str(one): 1, str(other): 1}
    with pytest.raises(ValueError, match=r"other: expected the classes of .*one, found others.*join"):
        mixed(shares=shares)
    joined = mixed(shares=Mixture(shares, classes="join"))
    assert joined.shards.classes == ("cat", "dog", "cow", "ant")
    stored = mixed(shares=Mixture(shares, classes="stored"))
    # The number of each stored label among the joined classes.
    numbers = torch.tensor([[0, 1, -1], [2, 1, 3]])
    for (_, labels, indices, more), (_, as_stored, *_) in zip(joined, stored, strict=True):
        assert torch.equal(labels, numbers[more["source"], as_stored])
        assert [joined.dataset[index][1] for index in indices.tolist()] == labels.tolist()
    assert joined.dataset.targets == joined.shards.labels.tolist()


def test_parts_have_splits_indices_and_digests(folder: Path, mixed: Open) -> None:
    photos, digest = folder / "photos", open_shards(folder / "photos").digest
    parts = [
        Part(photos, 1, indices=range(10), digest=digest[:12]),
        Part(photos, 1, split="train", indices=[40, 41, 42]),
    ]
    found = samples_of(mixed(shares=parts))
    assert {number for source, number in found if source == 0} == set(range(10))
    assert {number for source, number in found if source == 1} == {40, 41, 42}


@pytest.mark.parametrize(
    ("shares", "options", "word"),
    [
        ({}, {}, "list of Part"),
        ([], {}, "list of Part"),
        ({"photos": 0}, {}, "not all 0"),
        ({"photos": -1, "few": 2}, {}, "at least 0"),
        ({"photos": 1, "few": 2}, {"epoch_batches": None}, "epoch_batches"),
        ({"photos": 1, "few": 2}, {"weights": [1]}, "weights is for one set"),
        ({"photos": 1, "few": 2}, {"indices": [1]}, "indices is for one set"),
        ({"photos": 1, "few": 2}, {"digest": "0" * 12}, "digest is for one set"),
        ({"photos": 1, "few": 2}, {"tail": "short"}, "needs no tail"),
        ({"photos": 1, "photos/": 2}, {}, "photos/: expected each set once"),
        ({"photos": 1, "small": 2}, {}, "small, train: expected the image shape"),
        ({"photos": 1, "plain": 2}, {"arrays": ["mask"]}, "plain, train: arrays must be among none; found 'mask'"),
        ({"photos": 1, "floats": 2}, {}, "floats, train: expected the label type"),
        ({"photos": 1, "nothing": 2}, {}, "nothing"),
        ([Part("photos", indices=np.ma.masked_equal([1, 2], 2))], {}, "mask"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(
    shares: Any, options: dict[str, Any], word: str, folder: Path, mixed: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if not Path("small").exists():
        write(Path("plain"), 4, arrays={})
        with ShardWriter("small", (2, 2, 3), classes=["cat", "dog"]) as writer:
            writer.append(np.zeros((2, 2, 3), np.uint8), 0)
        with ShardWriter("floats", SHAPE, labels=("float32", 2), classes=["cat", "dog"]) as writer:
            writer.append(np.zeros(SHAPE, np.uint8), [0.5, 1.0])
    with pytest.raises((ValueError, OSError, FormatError), match=word):
        mixed(shares=shares, **options)


def test_a_cache_serves_all_sets_and_damage_is_found_in_each(folder: Path, tmp_path: Path, mixed: Open) -> None:
    expected = samples_of(mixed(arrays=["mask", "score"]))
    for _ in range(2):
        loader = mixed(cache=tmp_path / "cache", arrays=["mask", "score"])
        assert samples_of(loader) == expected
        assert [one["shards"] for one in loader.stats()["staging"]] == [6, 3, 1]
        assert loader.stats()["shares"] == [10 / 16, 5 / 16, 1 / 16]
        assert repr(loader).startswith("<ShardLoader ")
        loader.close()
    sets = {str(shutil.copytree(folder / name, tmp_path / name)): share for name, share in SHARES.items()}
    flip(tmp_path / "drawn" / "train-00000.npy", 4096 + 3 * 960 + 7)
    loader = mixed(shares=sets, check="sample")
    with pytest.raises(FormatError, match=r"drawn/train-00000.npy: sample .*crc32"):
        list(loader)


def test_sets_of_arrays_alone_and_without_labels_are_mixed(tmp_path: Path) -> None:
    for name, first in (("one", 0), ("other", 100)):
        with ShardWriter(tmp_path / name, None, labels=None, arrays={"latent": ("array", "float32", (3,))}) as writer:
            for number in range(7):
                writer.append(latent=np.full(3, first + number, np.float32))
    with ShardLoader({tmp_path / "one": 1, tmp_path / "other": 3}, 8, epoch_batches=2, device="cpu") as loader:
        for (more,) in loader:
            assert torch.equal((more["latent"][:, 0] >= 100).long(), more["source"])
            assert more["source"].sum() == 6
        assert loader.dataset[8][0]["latent"].tolist() == [101.0] * 3


@pytest.mark.parametrize("first", ["with", "without"])
def test_an_array_with_the_name_of_the_sets_number_is_refused_if_any_set_has_it(first: str, tmp_path: Path) -> None:
    arrays = {"latent": ("array", "float32", (3,)), "source": ("array", "int64", ())}
    values = {"latent": np.zeros(3, np.float32), "source": 0}
    for folder, names in (("with", ["latent", "source"]), ("without", ["latent"])):
        with ShardWriter(tmp_path / folder, None, arrays={name: arrays[name] for name in names}) as writer:
            writer.append(None, 0, **{name: values[name] for name in names})
    parts = {str(tmp_path / folder): 1 for folder in sorted(("with", "without"), key=first.__ne__)}
    options: dict[str, Any] = {"epoch_batches": 1, "device": "cpu"}
    for one, arrays in ((parts, []), ({str(tmp_path / "with"): 1}, []), ({str(tmp_path / "with"): 1}, ["source"])):
        with pytest.raises(ValueError, match=f"{tmp_path}/with: the array 'source'"):
            ShardLoader(one, 2, arrays=arrays, **options)
    with ShardLoader(parts, 2, arrays=["latent"], **options) as loader:
        ((_, more),) = loader
        assert sorted(more["source"].tolist()) == [0, 1]
        assert list(loader.dataset[1][1]) == ["latent"]
