"""torch.compile: shardio does the same inside of a compiled function as outside."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pictures import sample_images

from shardio import ShardDataset, ShardLoader, open_shards
from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop, ToDtype
from shardio.system.eager import eager

SHAPE = (12, 10, 3)
RANDOM = Compose([RandomResizedCrop(8), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.bfloat16)])
Compile = Callable[..., Any]


@pytest.fixture
def compiled() -> Iterator[Compile]:
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="eager")
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def pool() -> None:
    """The processes with which torch compiles: torch 2.4 starts them with this import, and their pipes stay open."""
    import torch._inductor.async_compile  # noqa: F401


@pytest.fixture
def path(make_set: Callable[..., Path]) -> Path:
    return make_set(40, SHAPE)


def loader_of(path: Path, **options: Any) -> ShardLoader:
    return ShardLoader(path, 8, device="cpu", num_threads=1, **options)


def test_a_compiled_function_calls_a_random_transform(compiled: Compile) -> None:
    def twice(batch: torch.Tensor, epoch: int) -> torch.Tensor:
        changed = RANDOM(batch * 1, seed=1, epoch=epoch, indices=range(len(batch)))
        assert isinstance(changed, torch.Tensor)
        return changed.float() * 2

    function = compiled(twice)
    for epoch in range(2):
        assert torch.equal(function(sample_images(6, SHAPE), epoch), twice(sample_images(6, SHAPE), epoch))


def test_a_compiled_function_opens_sets_and_draws_from_iterators(compiled: Compile, path: Path) -> None:
    def total(loader: ShardLoader) -> torch.Tensor:
        loader.set_epoch(1)
        found = [batch.float().mean() + labels.sum() for batch, labels in loader]
        with loader_of(path) as another:
            found += [batch.float().mean() for batch, _ in another]
        (image, label), shards = ShardDataset(path)[3], open_shards(path)
        labels = torch.from_numpy(shards.labels_of(np.array([4, 5])))
        counts = len(shards) + labels.sum() + loader.stats()["images"]
        return torch.stack([*found, image.float().mean() + label, counts])

    with loader_of(path, transform=RANDOM) as first, loader_of(path, transform=RANDOM) as second:
        assert torch.equal(compiled(total)(second), total(first))


@pytest.mark.parametrize("transform", [RANDOM, lambda batch: batch.float() / 255])
def test_a_loader_calls_what_is_compiled_as_it_calls_it_uncompiled(
    transform: Any, compiled: Compile, path: Path
) -> None:
    with (
        loader_of(path, transform=transform, seed=3) as plain,
        loader_of(path, transform=compiled(transform), seed=3) as loader,
    ):
        for _ in range(2):
            for (expected, _), (found, _) in zip(plain, loader, strict=True):
                assert torch.equal(found, expected)


def test_an_eager_function_is_itself_and_waits_for_no_import_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(a: int, *, b: int = 1) -> int:
        """Adds."""
        return a + b

    importing = ModuleType("torch._dynamo")
    importing.__spec__ = ModuleSpec("torch._dynamo", None)
    importing.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._dynamo", importing)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: pytest.fail("the compiler is asked for"))
    once = eager(add)
    assert (once(1), once(1, b=2)) == (2, 3)
    assert (once.__name__, once.__doc__) == ("add", "Adds.")


def test_a_function_that_wraps_a_transform_is_called_itself(path: Path) -> None:
    @functools.wraps(RANDOM)
    def seven(batch: torch.Tensor) -> torch.Tensor:
        return torch.full_like(batch, 7)

    with loader_of(path, transform=seven) as loader:
        assert all((batch == 7).all() for batch, _ in loader)


def test_training_imports_neither_the_compiler_nor_pillow(path: Path) -> None:
    script = """
import sys
from shardio import ShardLoader
from shardio.augment import HorizontalFlip
with ShardLoader(sys.argv[1], 8, device="cpu", transform=HorizontalFlip()) as loader:
    list(loader)
assert not {"torch._dynamo", "PIL"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=120)
