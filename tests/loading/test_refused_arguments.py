"""Arguments that ShardLoader refuses: the type of the error, and a word that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio import ShardLoader, ShardWriter
from shardio.augment import HorizontalFlip
from shardio.errors import FormatError, LaunchError, SetNotFoundError

Refusal = tuple[dict[str, Any], type[Exception], str]
# It draws once for a batch.
RANDOM_FLIP = type("RandomFlip", (), {"__module__": "torchvision.transforms.v2", "__call__": abs})()

BEFORE_A_SET_IS_LOOKED_FOR: list[Refusal] = [
    *(({"path": path}, ValueError, "path") for path in (None, 3)),
    *(({"batch_size": value}, TypeError, "batch_size") for value in (2.5, "256", {0: 4}, None)),
    *(({"seed": value}, TypeError, "seed") for value in (1.5, "2", 2.0, None)),
    *(({name: None}, TypeError, f"{name} must be an integer; found None") for name in ("prefetch", "repeats")),
    ({"epoch_batches": 2.0}, TypeError, "epoch_batches"),
    ({"epoch_batches": 0}, ValueError, "epoch_batches"),
    ({"epoch_batches": 3, "tail": "pad"}, ValueError, "tail"),
    ({"rank": 1}, LaunchError, "world_size"),
    ({"rank": 3, "world_size": 3}, LaunchError, "rank 3"),
    ({"rank": "0", "world_size": 2}, TypeError, "rank"),
    *(({"device": device}, ValueError, "device must") for device in ("gpu", 3.5, "meta", "mps")),
    *(({"num_threads": count}, ValueError, "num_threads") for count in (0, -1)),
    ({"num_threads": "2"}, TypeError, "num_threads"),
    ({"prefetch": -1, "num_threads": 2}, ValueError, "prefetch"),
    ({"prefetch": 2**64}, ValueError, "prefetch"),
    ({"prefetch": 1.5}, TypeError, "prefetch"),
    ({"io": "fast"}, ValueError, "io"),
    ({"together": True}, ValueError, "cache="),
    ({"transform": 3}, TypeError, "transform"),
    ({"transform": {0: None}}, TypeError, "transform"),
    ({"transform": HorizontalFlip}, TypeError, r"HorizontalFlip\("),
    ({"transform": torch.nn.Flatten}, TypeError, r"Flatten\("),
    *(({"check": value}, ValueError, "check") for value in ("all", None)),
    ({"arrays": "clip"}, TypeError, "arrays"),
    ({"arrays": [3]}, TypeError, "arrays"),
    ({"columns": ["year"]}, TypeError, "columns"),
    *(({"images": value}, ValueError, "images") for value in ("clip", 1)),
    *(({"report_every": value}, ValueError, "report_every") for value in (0, True, -1.0, "30")),
]

OF_A_SET: list[Refusal] = [
    ({"path": "nothing"}, SetNotFoundError, "nothing"),
    *(({"split": split}, SetNotFoundError, "split") for split in ("test", None, ["train"], {})),
    ({"digest": 4}, ValueError, "digest"),
    ({"digest": "0" * 12}, FormatError, "digest"),
    ({"batch_size": 0}, ValueError, "batch_size"),
    ({"batch_size": 12}, ValueError, "global batch of 12"),
    ({"batch_size": 3, "rank": 3, "world_size": 4}, ValueError, "global batch of 12"),
    ({"batch_size": 10**9}, ValueError, "batch_size"),
    *(
        ({"batch_size": size, "transform": HorizontalFlip(), **more}, ValueError, rf"batch_size={size}.* [\d,]+ bytes")
        for size in (10**12, 2**62)
        for more in ({"tail": "pad"}, {"epoch_batches": 1})
    ),
    ({"indices": np.ma.array([1, 2], mask=[True, False])}, ValueError, r"indices.*mask.*compressed\(\)"),
    ({"seed": -1}, ValueError, "seed"),
    ({"tail": "cut"}, ValueError, "tail"),
    ({"repeats": 0}, ValueError, "repeats"),
    ({"repeats": 3}, ValueError, "repeats=3"),
    ({"repeats": 2, "tail": "short"}, ValueError, "tail"),
    ({"arrays": ["masks"]}, ValueError, "arrays.*mask.*'masks'"),
    ({"arrays": ["clip", "mask", "clip"]}, ValueError, "arrays.*'clip' twice"),
    ({"arrays": ["source_width"]}, ValueError, "arrays.*'source_width'"),
    ({"images": None, "transform": HorizontalFlip()}, ValueError, "transform"),
    ({"transform": RANDOM_FLIP}, ValueError, "RandomFlip"),
    ({"together": True, "cache": "no cache"}, LaunchError, "init_process_group"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven samples with arrays."""
    out = tmp_path_factory.mktemp("refusals") / "set"
    rows = {"mask": np.zeros((6, 5), np.uint8), "clip": np.zeros(2, np.float32)}
    kinds = {"mask": "mask", "clip": "array"}
    arrays = {name: (kinds[name], row.dtype, row.shape) for name, row in rows.items()}
    with ShardWriter(out, (6, 5, 3), arrays=arrays) as writer:
        for number in range(11):
            writer.append(np.zeros((6, 5, 3), np.uint8), number, **rows)
    return out


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [*(({"path": "nothing", **given}, *refusal) for given, *refusal in BEFORE_A_SET_IS_LOOKED_FOR), *OF_A_SET],
)
def test_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], word: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with pytest.raises(error, match=word):
        ShardLoader(**{"path": path, "batch_size": 4, "device": "cpu", **options})


@pytest.mark.parametrize("transform", [None, HorizontalFlip()])
def test_a_batch_size_above_the_set_takes_no_more_memory_than_the_set(
    transform: HorizontalFlip | None, make_set: Callable[..., Path]
) -> None:
    path, options = make_set(11), {"tail": "short", "device": "cpu", "shuffle": False, "transform": transform}
    for batch_size, world_size in product((11, 10**9, 2**62), (1, 3)):
        found = []
        for rank in range(world_size):
            with ShardLoader(path, batch_size, rank=rank, world_size=world_size, **options) as loader:  # type: ignore[arg-type]
                assert loader.batch_size == batch_size
                ((_, labels),) = loader
                found += labels.tolist()
        assert found == [i % 7 for i in range(11)]


@pytest.mark.parametrize(
    ("device", "count", "seen"),
    [
        *((device, 0, "no CUDA device") for device in ("cuda", "cuda:7", "cuda:99999", torch.device("cuda", 1))),
        ("cuda:2", 2, "cuda:0 to cuda:1"),
    ],
)
def test_a_gpu_that_is_not_here_is_refused_with_those_that_are(
    device: Any, count: int, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"{seen}.*CUDA_VISIBLE_DEVICES"):
        ShardLoader(tmp_path, 4, device=device)


ENDLESS: dict[str, Any] = {"epoch_batches": 3}
# The options of a loader, changes of its state, and a word that names what is wrong.
STATES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        ({}, {name: value}, f"other (data|order): its {name} is {value!r}")
        for name, value in {
            "seed": 1,
            "shuffle": False,
            "split": "val",
            "digest": "0" * 64,
            "order_version": 0,
            "endless": True,
            "more": None,
        }.items()
    ),
    *(({}, {"seed": value}, "seed must be an integer") for value in (0.0, "0", np.float32(0), torch.tensor(0.5))),
    *(({}, {"consumed": value}, f"consumed {value}") for value in (10, -1)),
    *(({}, {"epoch": value}, f"epoch {value!r}") for value in (-1, 1 << 64, "3")),
    *((ENDLESS, {"batch": value}, f"batch {value}") for value in (-1, 1.0)),
    (ENDLESS, {"consumed": 2**62}, r"2\*\*62"),
    (ENDLESS, {"repeats": 2}, "repeats"),
    ({**ENDLESS, "repeats": 2}, {"consumed": 3}, "repeats=2"),
]


@pytest.mark.parametrize(("options", "changed", "word"), STATES)
def test_states_of_other_loaders_are_refused(
    options: dict[str, Any], changed: dict[str, Any], word: str, make_set: Callable[..., Path]
) -> None:
    with ShardLoader(make_set(9), 2, device="cpu", **options) as loader:
        state = loader.state_dict()
        with pytest.raises(ValueError, match=word):
            loader.load_state_dict({**state, **changed})
        for epoch in (-1, 2**62 if options else 2**64):
            with pytest.raises(ValueError, match=r"epoch|fewer than 2\*\*62"):
                loader.set_epoch(epoch)
        assert loader.state_dict() == state
        assert len(list(loader)) == len(loader)


def test_what_is_no_state_is_refused_in_few_words(make_set: Callable[..., Path]) -> None:
    with ShardLoader(make_set(9), 2, device="cpu") as loader:
        state = loader.state_dict()
        for wrong in (None, 3, []):
            with pytest.raises(TypeError, match="state"):
                loader.load_state_dict(wrong)  # type: ignore[arg-type]
        for lacking in ({}, {"loader": state}):
            with pytest.raises(ValueError, match="it lacks digest, split, "):
                loader.load_state_dict(lacking)
        odd = np.arange(2), torch.arange(2), np.array(0.5), [torch.arange(2)], "x" * 10**6, None
        for name, value in product(state, odd):
            with pytest.raises(ValueError, match=name) as caught:
                loader.load_state_dict({**state, name: value})
            assert len(str(caught.value)) < 1000
        assert loader.state_dict() == state
