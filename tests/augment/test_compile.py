"""torch.compile and torch.export: shardio does the same inside of them as outside.

The compiler is imported only by what the tests call, as in a program that has just begun.
"""

from __future__ import annotations

import functools
import shutil
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
BACKENDS = ["eager", "aot_eager"]
Compile = Callable[..., Any]


@pytest.fixture(params=BACKENDS)
def compiled(request: pytest.FixtureRequest) -> Iterator[Compile]:
    """torch.compile, with one of the backends."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend=request.param)
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


def test_a_compiled_random_transform_gives_the_same_pixels(compiled: Compile) -> None:
    transform = compiled(RANDOM)
    for epoch in range(3):
        expected = RANDOM(sample_images(6, SHAPE), seed=1, epoch=epoch, indices=range(5, 11))
        assert torch.equal(transform(sample_images(6, SHAPE), seed=1, epoch=epoch, indices=range(5, 11)), expected)


def test_a_compiled_function_calls_a_random_transform(compiled: Compile) -> None:
    def twice(batch: torch.Tensor, epoch: int) -> torch.Tensor:
        changed = RANDOM(batch * 1, seed=1, epoch=epoch, indices=range(len(batch)))
        assert isinstance(changed, torch.Tensor)
        return changed.float() * 2

    function = compiled(twice)
    for epoch in range(3):
        assert torch.equal(function(sample_images(6, SHAPE), epoch), twice(sample_images(6, SHAPE), epoch))


# torch 2.13 warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_compiled_function_calls_a_random_transform_with_inductor() -> None:
    def twice(batch: torch.Tensor) -> torch.Tensor:
        return RANDOM(batch, seed=1).float() * 2

    torch._dynamo.reset()
    try:
        assert torch.equal(torch.compile(twice)(sample_images(6, SHAPE)), twice(sample_images(6, SHAPE)))
    finally:
        # torch 2.4 links it so that, from then on, this thread takes the smallest numbers for 0.
        torch.set_flush_denormal(False)


def train(loader: ShardLoader, weight: torch.Tensor) -> tuple[torch.Tensor, list[int], int]:
    sums, consumed = torch.zeros(3), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch, labels in loader:
            sums = sums + batch.float().mean((0, 2, 3)) * weight + labels.sum()
        consumed.append(loader.state_dict()["consumed"])
    return sums, consumed, loader.stats()["images"]


def test_a_compiled_function_trains_on_a_loader(compiled: Compile, path: Path) -> None:
    with loader_of(path, transform=RANDOM) as first, loader_of(path, transform=RANDOM) as second:
        expected = train(first, torch.ones(3))
        found = compiled(train)(second, torch.ones(3))
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:] == ([0, 0], 80)


def test_a_compiled_function_makes_its_loader(compiled: Compile, path: Path) -> None:
    def total() -> torch.Tensor:
        with loader_of(path) as loader:
            return torch.stack([batch.float().mean() for batch, _ in loader])

    assert torch.equal(compiled(total)(), total())


def test_a_compiled_function_reads_samples(compiled: Compile, path: Path) -> None:
    dataset, shards = ShardDataset(path), open_shards(path)

    def total() -> torch.Tensor:
        found = torch.zeros(())
        for number in (3, -1):
            image, label = dataset[number]
            found = found + image.float().mean() + label
        return found + len(shards) + torch.from_numpy(shards.labels_of(np.array([4, 5]))).sum()

    assert torch.equal(compiled(total)(), total())


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


def test_transforms_are_not_disturbed_by_what_another_thread_compiles(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(path, transform=RANDOM) as loader:
        expected = [batch for batch, _ in loader]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # in all threads, as long as one compiles
    with loader_of(path, transform=RANDOM) as loader:
        assert all(map(torch.equal, (batch for batch, _ in loader), expected))


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
