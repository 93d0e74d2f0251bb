"""`shardio view` and `shardio replay`: samples of a set, and the batches that a training process had."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from command import assert_one_clear_error, shardio
from PIL import Image

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, Transform, Views
from shardio.cli.main import cli
from shardio.cli.pictures import levels_of
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

CHAIN = Compose([RandomResizedCrop(8), HorizontalFlip(), Normalize("imagenet")])


def called(*words: object) -> str:
    """Runs a command in this process, and returns what it printed."""
    result = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def out(make_set: Callable[..., Path]) -> Path:
    return make_set(61, (12, 10, 3))


def pixels_of(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def test_view_draws_the_samples_that_were_asked_for(out: Path, tmp_path: Path) -> None:
    text = called("view", out, "--indices", "3,17,20-22", "--side", 12, "-o", tmp_path / "sheet.png")
    drawn = pixels_of(tmp_path / "sheet.png")
    assert text == f"{tmp_path}/sheet.png: {drawn.shape[1]} x {drawn.shape[0]} pixels\n"
    shards = open_shards(out)
    for place, index in enumerate([3, 17, 20, 21, 22]):
        left = 6 + place * 16
        np.testing.assert_array_equal(drawn[6:18, left : left + 10], shards[index].image)


def test_view_draws_samples_of_a_class(out: Path, tmp_path: Path) -> None:
    for words in (["--class", "c3"], ["--per-class", 2]):
        called("view", out, *words, "-o", tmp_path / "sheet.png")
        assert pixels_of(tmp_path / "sheet.png").size


def test_view_shows_augmentations_and_views(out: Path, tmp_path: Path) -> None:
    for number, chain in enumerate((CHAIN, Views([CHAIN, CHAIN]))):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(chain.to_dict()))
        called(
            *("view", out, "--count", 2, "--augmented", path, "--draws", 3),
            *("--side", 12, "-o", tmp_path / "sheet.png"),
        )
        columns = 4 + 3 * number
        assert pixels_of(tmp_path / "sheet.png").shape[1] == columns * 18 + 6 or columns * 16 + 6


def test_view_shows_damaged_samples(out: Path, tmp_path: Path) -> None:
    assert called("view", out, "--damaged", "-o", tmp_path / "sheet.png") == "no sample of the split is damaged\n"
    shard = out / "train-00001.npy"
    data = bytearray(shard.read_bytes())
    data[4096 + 2 * 360] ^= 1
    shard.write_bytes(data)
    called("view", out, "--damaged", "--side", 12, "-o", tmp_path / "sheet.png")
    np.testing.assert_array_equal(pixels_of(tmp_path / "sheet.png")[6:18, 6:16], open_shards(out)[12].image)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--indices", "5,61"], ["expected numbers of samples from 0 to 60, found 5 to 61"]),
        (["--indices", "a"], ["expected numbers such as 5,17 or 0-23, or an NPY file of them; found 'a'"]),
        (["--class", "c33"], ["expected a class of the set, or a number from 0 to 6, found 'c33': did you mean c3"]),
        ([], ["expected a terminal, or a file for the sheet"]),
        (["--augmented", "nothing"], ["nothing"]),
        (["--augmented", "deit3", "--against", "."], ["give one of them"]),
    ],
)
def test_view_tells_what_is_wrong(out: Path, words: list[str], parts: list[str]) -> None:
    assert_one_clear_error(shardio("view", out, *words), 2, *parts)


# --- replay -----------------------------------------------------------------------------------------------------------


def test_replay_gives_the_keys_and_pixels_that_training_had(out: Path, tmp_path: Path) -> None:
    """Random seeds, epochs, steps, ranks and resumes on other numbers of ranks; training writes down what it has."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    chain = tmp_path / "chain.json"
    chain.write_text(json.dumps(CHAIN.to_dict()))
    keys = open_shards(out).index["key"]
    for _ in range(12):
        options: dict[str, Any] = {
            "seed": rng.randrange(1 << 40),
            "shuffle": rng.choice([True, False, "block"]),
            "tail": rng.choice(["drop", "pad", "short"]),
        }
        epoch, state = rng.randrange(5), None
        # Some batches on some ranks, then the rest on others, from the state that these have left.
        for _ in range(rng.randint(1, 3)):
            world, batch_size = rng.randint(1, 3), rng.randint(2, 5)
            rank = rng.randrange(world)
            with ShardLoader(
                *(out, batch_size), rank=rank, world_size=world, device="cpu", transform=CHAIN, return_indices=True,
                **options,
            ) as loader:  # fmt: skip
                loader.set_epoch(epoch)
                if state is not None:
                    loader.load_state_dict(state)
                if not len(iter(loader)):
                    break
                wanted = rng.randrange(len(iter(loader)))
                iterator = iter(loader)
                for _ in range(wanted):
                    next(iterator)
                before = loader.state_dict() if wanted or state is not None else {**loader.state_dict(), "epoch": epoch}
                images, labels, indices = next(iterator)
                state = loader.state_dict()
            words = [
                *("replay", out, "--batch-size", batch_size, "--rank", rank, "--world-size", world),
                *("--tail", options["tail"], "--seed", options["seed"], "--transform", chain),
                *("--save", tmp_path / "batch.npz", "--json"),
            ]
            if rng.random() < 0.5:
                (tmp_path / "state.json").write_text(json.dumps({"model": {}, "loader": before}))
                words += ["--state", tmp_path / "state.json"]
            else:
                words += ["--epoch", epoch, "--consumed", before["consumed"]]
                words += ["--shuffle", str(options["shuffle"]).lower()]
            told = json.loads(called(*words))
            assert told["indices"] == indices.tolist()
            assert told["keys"] == [key.decode() for key in keys[indices.numpy()].tolist()]
            with np.load(tmp_path / "batch.npz") as batch:
                np.testing.assert_array_equal(batch["images"], images.numpy())
                np.testing.assert_array_equal(batch["labels"], labels.numpy())
                np.testing.assert_array_equal(batch["indices"], indices.numpy())


def test_replay_finds_the_state_in_a_checkpoint_of_torch(out: Path, tmp_path: Path) -> None:
    with ShardLoader(out, 8, seed=5, device="cpu", return_indices=True) as loader:
        iterator = iter(loader)
        next(iterator)
        torch.save({"step": 1, "data": [], "state": {"loader": loader.state_dict()}}, tmp_path / "checkpoint.pt")
        expected = next(iterator)[2].tolist()
    told = json.loads(called("replay", out, "--batch-size", 8, "--state", tmp_path / "checkpoint.pt", "--json"))
    assert told["indices"] == expected
    assert told["consumed"] == 8


def test_replay_tells_a_table_and_draws_what_the_model_saw(out: Path, tmp_path: Path) -> None:
    text = called("replay", out, "--batch-size", 4, "--step", 2, "--shuffle", "false", "-o", tmp_path / "sheet.png")
    lines = text.splitlines()
    assert lines[1].split() == ["sample", "class", "key"]
    assert lines[2].split() == ["8", "c1", "c1/8.png"]
    assert lines[-1] == "epoch 0, after 8 samples of all ranks; rank 0 of 1"
    assert pixels_of(tmp_path / "sheet.png").size


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--step", "15"], ["expected one of the 15 of an epoch, from 0 on; found 15"]),
        (["--consumed", "62"], ["62"]),
        (["--step", "1", "--consumed", "4"], ["give one of them"]),
        (["--rank", "2"], ["rank"]),
        (["--state", "/nowhere.json"], ["/nowhere.json"]),
    ],
)
def test_replay_tells_what_is_wrong(out: Path, words: list[str], parts: list[str]) -> None:
    result = shardio("replay", out, "--batch-size", "4", *words)
    assert_one_clear_error(result, result.returncode or 2, *parts)


def test_a_file_without_a_state_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"epoch": 3}')
    (tmp_path / "state.pt").write_bytes(b"no checkpoint")
    for name, part in (("state.json", "found none"), ("state.pt", "expected JSON, or a checkpoint of torch")):
        assert_one_clear_error(shardio("replay", out, "--batch-size", "4", "--state", tmp_path / name), 2, name, part)


@pytest.mark.parametrize("transform", [None, CHAIN, Compose([Normalize(0.5, 0.25)])])
def test_what_the_model_saw_is_shown_in_grey_levels(transform: Transform | None) -> None:
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    flat = Compose([Normalize("imagenet")]) if transform is CHAIN else transform
    seen = images if flat is None else flat(images)
    np.testing.assert_array_equal(levels_of(seen, transform), images.permute(0, 2, 3, 1).numpy())  # type: ignore[arg-type]
