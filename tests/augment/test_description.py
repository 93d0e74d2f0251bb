"""Transforms print as the calls that make them, and are stored as dictionaries that nothing else can be made of."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transforms import ALL

import shardio.augment
from shardio.augment import (
    CenterCrop,
    Compose,
    GaussianBlur,
    Mixup,
    Normalize,
    RandomAffine,
    RandomApply,
    RandomChoice,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Views,
    from_dict,
)
from shardio.augment.batch import Batch
from shardio.augment.chain import Transform

FILLED = [Compose([Resize(3)], mask_fill=255), Views([Resize(3), Resize(4)], {"b": 1, "a": 0.5})]


@pytest.mark.parametrize("transform", [*ALL, *FILLED], ids=lambda transform: type(transform).__name__)
def test_a_transform_comes_back_from_json_from_what_is_printed_and_from_copies(transform: Transform) -> None:
    values = json.loads(json.dumps(transform.to_dict(), allow_nan=False))
    printed = eval(repr(transform), {**vars(shardio.augment), "torch": torch})
    copies = pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform), replace(transform)
    for again in (from_dict(values), printed, *copies):
        assert type(again) is type(transform)
        assert again == transform
        assert hash(again) == hash(transform)
        assert again.digest == transform.digest
        assert again.to_dict() == values


def test_digests_are_all_different() -> None:
    transforms = [*ALL, *(Compose(map(CenterCrop, sizes)) for sizes in ((8, 9), (9, 8)))]
    assert len({transform.digest for transform in transforms}) == len(transforms)


def test_only_what_is_not_as_by_default_is_printed() -> None:
    inner = RandomApply([GaussianBlur(3), Compose([])])
    assert repr(Compose([inner, Resize((8, 9))])) == (
        "Compose([\n    RandomApply([\n        GaussianBlur(kernel_size=3),\n"
        "        Compose(transforms=()),\n    ]),\n    Resize(size=(8, 9)),\n])"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Normalize([0.5] * 3, np.full(3, 0.2)), Normalize((0.5,) * 3, torch.full((3,), 0.2, dtype=torch.float64))),
        (Resize([8, 9]), Resize((8, 9))),  # type: ignore[arg-type]
        (RandomResizedCrop(np.int64(8), [0.1, 1], np.array([0.5, 2])), RandomResizedCrop(8, (0.1, 1.0), (0.5, 2.0))),  # type: ignore[arg-type]
        (Mixup(np.int64(5), np.float64(0.2)), Mixup(5, 0.2)),  # type: ignore[arg-type]
        (RandomChoice([Resize(3)], [1]), RandomChoice((Resize(3),), (1.0,))),
        (RandomAffine([1, 2], fill=[1, 2, 3]), RandomAffine((1, 2), fill=(1.0, 2.0, 3.0))),  # type: ignore[arg-type]
        (Compose([], {"b": 1, "a": 2}), Compose([], [("a", 2.0), ("b", 1)])),  # type: ignore[arg-type]
        (RandomErasing(1, count=[1, 2]), RandomErasing(1.0, count=(1, 2))),  # type: ignore[arg-type]
    ],
)
def test_equal_arguments_of_other_types_are_equal_transforms(one: Transform, other: Transform) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest


CROP = {"transform": "CenterCrop", "size": 8}
DEEP: Any = 8
CHAIN: Any = CROP
for _ in range(5000):
    DEEP, CHAIN = [DEEP], {"transform": "Compose", "transforms": [CHAIN]}
REFUSED: list[Any] = [
    *(None, [], "CenterCrop", 7, {}, {"transform": None}, {"transform": []}),
    *({"transform": name} for name in ("Nothing", "Transform", "_Sometimes", "Configuration", "os.system", "Compose")),
    *({"transform": "_Sometimes", "p": 0.5}, {"transform": "_Mix", "num_classes": 3}, {"transform": "CenterCrop"}),
    *({**CROP, "more": 1}, {**CROP, 3: 4}, {**CROP, "size": True}),
    *({**CROP, "size": size} for size in ("8", {}, {"size": 8}, CROP, [[8, 9]], DEEP)),
    {"transform": "Normalize", "statistics": [[0.1], [0.1]]},
    *({"transform": "Normalize", "mean": mean, "std": 1} for mean in ("torch.load", CROP)),
    *(
        {"transform": "ToDtype", "dtype": dtype}
        for dtype in (
            *("torch.load", "torch.nothing", "torch.uint8", "torch.", "float32", "torch.half", "torch.nn.Module"),
            "torch.Tensor",
        )
    ),
    *({"transform": "TimmRandAugment", "config": config} for config in ("torch.load", "torch.float32")),
    *({"transform": "Compose", "transforms": parts} for parts in (3, "torch.float32", "abc", [3], [None])),
    {"transform": "Compose", "transforms": [{"transform": "Views", "transforms": []}]},
    *({"transform": "Views", "transforms": CROP}, DEEP, CHAIN),
    {"transform": "RandomChoice", "transforms": [CROP], "p": {"a": 1}},
    *({"transform": "ColorJitter", "brightness": value} for value in ("x", float("nan"), 10**400)),
    {"transform": "RandAugment", "fill": [[1], [2], [3]]},
    {"transform": "RandomErasing", "value": "torch.float32"},
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_no_transform_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="found"):
        from_dict(REFUSED[number])


@dataclass(frozen=True)
class Brighter(Transform):
    by: float = 1.0

    def apply(self, batch: Batch, purpose: str) -> Batch:
        return batch


class Plain(Transform):
    def apply(self, batch: Batch, purpose: str) -> Batch:
        return batch


def test_transforms_of_other_modules_are_stored_with_their_module() -> None:
    transform = Compose([Brighter(2.0)])
    values = transform.to_dict()
    assert values["transforms"][0]["transform"].endswith("test_description:Brighter")
    assert from_dict(values) == transform


def test_a_transform_that_is_no_dataclass_can_be_used_and_printed_but_not_stored() -> None:
    transform = Compose([plain := Plain(), CenterCrop(2)])
    assert "Plain object at" in repr(transform)
    assert transform == Compose([plain, CenterCrop(2)])
    with pytest.raises(TypeError, match="dataclass"):
        _ = transform.digest
    with pytest.raises(ValueError, match="transform class"):
        from_dict({"transform": f"{__name__}:Plain"})


def test_arguments_that_json_cannot_hold_are_refused() -> None:
    for value in ({1, 2}, b"ab", 1j, object()):
        with pytest.raises(TypeError, match="arguments"):
            Brighter(value).to_dict()  # type: ignore[arg-type]
