"""torch.compile: shardio does the same inside of a compiled function as outside.

The compiler is imported only by what the tests call, as in a program that has just begun.
"""

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
from shardio.augment import (
    Compose,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    ToDtype,
)
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


def test_a_compiled_function_opens_a_set(compiled: Compile, path: Path) -> None:
    def opened() -> torch.Tensor:
        with loader_of(path) as loader:
            made = [batch.float().mean() for batch, _ in loader]
        (image, label), shards = ShardDataset(path)[3], open_shards(path)
        labels = torch.from_numpy(shards.labels_of(np.array([4, 5])))
        return torch.stack([*made, image.float().mean() + label, len(shards) + labels.sum()])

    assert torch.equal(compiled(opened)(), opened())


def test_a_compiled_function_draws_from_an_iterator(compiled: Compile, path: Path) -> None:
    def total(loader: ShardLoader) -> tuple[torch.Tensor, int]:
        loader.set_epoch(1)
        found = [batch.float().mean() + labels.sum() for batch, labels in loader]
        return torch.stack(found), loader.stats()["images"]

    with loader_of(path, transform=RANDOM) as first, loader_of(path, transform=RANDOM) as second:
        expected, found = total(first), compiled(total)(second)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1] == 40


def test_a_loader_tells_a_compiled_transform_the_seed_the_epoch_and_the_samples(compiled: Compile, path: Path) -> None:
    with loader_of(path, transform=RANDOM, seed=3) as plain:
        expected = [batch for _ in range(2) for batch, _ in plain]
    with loader_of(path, transform=compiled(RANDOM), seed=3) as loader:
        found = [batch for _ in range(2) for batch, _ in loader]
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_loader_calls_a_compiled_function_of_the_users_with_images(compiled: Compile, path: Path) -> None:
    with loader_of(path) as plain, loader_of(path, transform=compiled(lambda batch: batch.float() / 255)) as loader:
        for (batch, _), (scaled, _) in zip(plain, loader, strict=True):
            assert torch.equal(scaled, batch.float() / 255)


def test_an_eager_function_waits_for_no_import_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = ModuleType("torch._dynamo")
    importing.__spec__ = ModuleSpec("torch._dynamo", None)
    importing.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._dynamo", importing)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: pytest.fail("the compiler is asked for"))
    assert eager(len)("abc") == 3


def test_a_function_that_wraps_a_transform_is_called_itself(path: Path) -> None:
    @functools.wraps(RANDOM)
    def seven(batch: torch.Tensor) -> torch.Tensor:
        return torch.full_like(batch, 7)

    with loader_of(path, transform=seven) as loader:
        assert all((batch == 7).all() for batch, _ in loader)


def test_training_imports_neither_the_compiler_nor_pillow(path: Path) -> None:
    script = f"""
import sys, torch
from shardio import ShardDataset, ShardLoader, open_shards
from shardio.augment import HorizontalFlip
with ShardLoader({str(path)!r}, 8, device="cpu", transform=HorizontalFlip()) as loader:
    list(loader)
ShardDataset({str(path)!r})[0], open_shards({str(path)!r})[0]
print("torch._dynamo" in sys.modules, "PIL" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout == "False False\n"


def test_an_eager_function_is_itself_to_its_callers() -> None:
    def add(a: int, *, b: int = 1) -> int:
        """Adds."""
        return a + b

    once = eager(add)
    assert (once(1), once(1, b=2)) == (2, 3)
    assert (once.__name__, once.__doc__) == ("add", "Adds.")
