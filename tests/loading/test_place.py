"""Whose batches state_dict() counts, and where the next iterator begins, against a plain model of the order."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from plain_sets import make_plain_set

from shardio import ShardLoader
from shardio.augment import Compose, Normalize, RandomCrop

Spot = tuple[int, int, int]  # epoch, samples consumed, batches of the epoch received


@dataclass(eq=False)
class Reader:
    """An iterator as the model knows it."""

    spot: Spot | None = None  # None before its first batch was asked for
    count: int = 0
    counts: bool = True  # whether what it delivers moves the place
    over: bool = False


class Model:
    """The rules of docs/guide/resume.md, over lists of sample numbers. `order(n)` has the first n samples of an endless
    stream; without `length`, of one epoch after the other, `num` samples each."""

    def __init__(self, order: list[int], num: int, size: int, tail: str, length: int | None) -> None:
        self.order, self.num, self.size, self.tail, self.length = order, num, size, tail, length
        self.spot: Spot = (0, 0, 0)
        self.coming: Spot = (0, 0, 0)
        self.base: Spot = (0, 0, 0)
        self.loaded: Spot | None = None
        self.owner: Reader | None = None
        self.former: tuple[Reader, Spot] | None = None
        self.was_given_back = self.comes_again = False
        self.warned: set[str] = set()
        self.readers: list[Reader] = []

    def left(self, spot: Spot) -> int:
        if self.length is not None:
            return self.length - spot[2]
        rest = self.num - spot[1]
        return rest // self.size if self.tail == "drop" else -(-rest // self.size)

    def following(self, spot: Spot) -> Spot:
        return (spot[0] + 1, 0 if self.length is None else spot[1] + self.left(spot) * self.size, 0)

    def batch(self, spot: Spot) -> tuple[list[int], Spot]:
        epoch, start, number = spot
        if self.length is not None:
            return self.order[start : start + self.size], (epoch, start + self.size, number + 1)
        whole = self.order[epoch * self.num : (epoch + 1) * self.num]
        more = whole * (self.size // self.num + 1) if self.tail == "pad" else []
        return (whole + more)[start : start + self.size], (epoch, min(start + self.size, self.num), number + 1)

    def new(self) -> Reader:
        self.readers.append(Reader())
        return self.readers[-1]

    def next(self, reader: Reader, fails: bool = False) -> list[int] | None:
        """The batch that the reader's `next` returns; None for StopIteration, or for an error if it fails."""
        if reader.spot is None:
            reader.spot = self.coming
        if reader.over:
            return None
        if not self.left(reader.spot):
            self.finish(reader)
            return None
        if fails:
            self.fail(reader)
            return None
        samples, reader.spot = self.batch(reader.spot)
        reader.count += 1
        if reader.counts:
            self.count(reader, reader.spot)
        return samples

    def count(self, reader: Reader, spot: Spot) -> None:
        first, more = reader.count == 1, self.left(spot) > 0
        if first and self.comes_again:
            self.warned.add("after load_state_dict")
        may_return = first and more and self.owner is not None and not self.was_given_back
        self.former = (self.owner, self.spot) if may_return and self.owner else None
        self.comes_again = self.loaded is not None and more
        self.coming = self.loaded if self.comes_again and self.loaded else self.following(spot)
        self.spot, self.owner, self.loaded, self.was_given_back = spot, reader, None, False

    def finish(self, reader: Reader) -> None:
        assert reader.spot is not None
        reader.over = True
        if reader.counts and (self.owner is reader or not reader.count):
            self.spot = self.coming = self.following(reader.spot)
            self.owner = self.former = self.loaded = None

    def fail(self, reader: Reader) -> None:
        reader.over = True
        if reader.counts and not reader.count:
            self.coming, self.comes_again = self.following(self.coming), False
        if self.owner is reader:
            self.owner = self.former = None

    def drop(self, reader: Reader) -> None:
        self.readers.remove(reader)
        if self.owner is reader:
            former, self.owner, self.former = self.former, None, None
            if former and former[0] in self.readers and not former[0].over:
                (self.owner, self.spot), self.was_given_back = former, True
                self.warned.add("middle of an epoch")

    def peek(self) -> list[int]:
        spot = self.spot if self.owner else self.coming
        while not self.left(spot):
            spot = self.following(spot)
        return self.batch(spot)[0]

    def go_to(self, spot: Spot) -> None:
        self.spot = self.coming = spot
        self.owner = self.former = None
        self.comes_again = self.was_given_back = False
        for reader in self.readers:
            reader.counts = reader.spot is None

    def load(self, spot: Spot) -> None:
        self.go_to(spot)
        self.loaded = self.base = spot

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.coming[0]:
            start, before = 0, self.base if epoch >= self.base[0] + (self.base[2] > 0) else (0, 0, 0)
            if self.length is not None:
                start = before[1] + ((epoch - before[0]) * self.length - before[2]) * self.size
            self.coming, self.comes_again = (epoch, start, 0), False
        elif self.comes_again:
            self.warned.add("after load_state_dict")
        if self.coming != self.spot:
            self.loaded = None
        self.go_to(self.coming)


class Job:
    """Loaders of all ranks that do the same at random, beside the model. AssertionError names the seed."""

    def __init__(self, sets: Any, seed: int, caught: list[warnings.WarningMessage]) -> None:
        self.rng, self.seed, self.sets, self.caught = random.Random(seed), seed, sets, caught
        self.options: dict[str, Any] = {"seed": seed, "device": "cpu", "num_threads": 1, "return_indices": True}
        self.tail: str = self.rng.choice(["drop", "pad", "short"])
        self.length: int | None = None
        if isinstance(sets, dict) or self.rng.random() < 0.4:
            self.tail, self.length = "drop", 1
        self.options["transform"] = self.rng.choice([None, self.transform])
        self.failing: list[type[BaseException]] = []
        self.states: list[str] = []
        options = {**self.options, "transform": None} | ({"epoch_batches": 160} if self.length else {"tail": "short"})
        with ShardLoader(sets, 50, **options) as alone:
            self.num = len(alone.dataset)
            epochs = 1 if self.length else 60
            self.order = [index for _ in range(epochs) for batch in alone for index in batch[2].tolist()]
        self.begin()

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        if self.failing:
            raise self.failing.pop()
        return images

    def begin(self) -> None:
        size, self.world = self.rng.randint(1, 5), self.rng.randint(1, 3)
        self.length = self.length and self.rng.randint(1, 5)
        options = self.options | {"prefetch": self.rng.randint(0, 2), "epoch_batches": self.length, "tail": self.tail}
        ranks = [{"rank": rank, "world_size": self.world} for rank in range(self.world)]
        self.loaders = [ShardLoader(self.sets, size, **options, **rank) for rank in ranks]
        self.model = Model(self.order, self.num, size * self.world, self.tail, self.length)
        self.iterators: dict[Reader, list[Any]] = {}

    def end(self) -> None:
        self.iterators.clear()
        while self.loaders:
            self.loaders.pop().close()
        told = [str(warning.message) for warning in self.caught if "peek()" in str(warning.message)]
        self.caught.clear()
        assert len(told) == self.world * len(self.model.warned), told
        assert all(sum(text in one for one in told) == self.world for text in self.model.warned), told

    def joined(self, calls: list[Callable[[], Any]]) -> list[int] | None:
        """The samples that all ranks together get; None if they get none."""
        found: list[list[int] | None] = []
        for call in calls:
            try:
                found.append(call()[2].tolist())
            except (StopIteration, ArithmeticError, KeyboardInterrupt):
                found.append(None)
        self.failing.clear()
        if None in found:
            assert found == [None] * self.world
            return None
        return [index for part in found if part is not None for index in part]

    def new(self) -> Reader:
        reader = self.model.new()
        self.iterators[reader] = [iter(loader) for loader in self.loaders]
        return reader

    def advance(self, reader: Reader, *, fails: bool = False) -> None:
        if fails and self.options["transform"]:
            self.failing = [self.rng.choice([ArithmeticError, KeyboardInterrupt])] * self.world
        expected = self.model.next(reader, bool(self.failing))
        assert self.joined([iterator.__next__ for iterator in self.iterators[reader]]) == expected

    def drop(self, reader: Reader, *, collected: bool = False) -> None:
        iterators = self.iterators.pop(reader)
        if collected:
            iterators.append(iterators)  # freed by a collection alone
            del iterators
            gc.collect()
        else:
            del iterators
        self.model.drop(reader)

    def loop(self, count: int) -> None:
        reader = self.new()
        for _ in range(count):
            self.advance(reader)
        self.drop(reader, collected=self.rng.random() < 0.1)

    def step(self) -> None:
        rng, readers = self.rng, list(self.iterators)
        what = rng.choices(["loop", "one", "new", "next", "drop", "peek", "set", "save", "load", "fail", "restart"],
                           [3, 6, 3, 9, 3, 3, 3, 4, 3, 2, 3])[0]  # fmt: skip
        if what == "loop":
            self.loop(rng.choice([2, 3, 40]))
        elif what == "one":
            self.loop(1)
        elif what == "new" and len(readers) < 3:
            reader = self.new()
            if rng.random() < 0.7:
                self.advance(reader)
        elif what == "next" and readers:
            reader = rng.choice(readers)
            for _ in range(rng.randint(1, 4)):
                self.advance(reader)
        elif what == "drop" and readers:
            self.drop(rng.choice(readers), collected=rng.random() < 0.2)
        elif what == "peek":
            assert self.joined([loader.peek for loader in self.loaders]) == self.model.peek()
        elif what == "set":
            epoch = rng.choice([self.model.coming[0], self.model.spot[0], rng.randint(0, 6)])
            self.model.set_epoch(epoch)
            for loader in self.loaders:
                loader.set_epoch(epoch)
        elif what == "save":
            self.states.append(json.dumps(self.loaders[0].state_dict()))
        elif what == "fail":
            self.advance(rng.choice(readers) if readers else self.new(), fails=True)
        elif what in ("load", "restart"):
            if what == "restart":
                self.states.append(json.dumps(self.loaders[0].state_dict()))
                self.end()
                self.begin()
            self.load(json.loads((self.states or [json.dumps(self.loaders[0].state_dict())])[-1]))

    def load(self, state: dict[str, Any]) -> None:
        batch = min(state["batch"], self.length) if self.length else 0
        self.model.load((state["epoch"], state["consumed"], batch))
        for loader in self.loaders:
            loader.load_state_dict(state)

    def check(self) -> None:
        states = [loader.state_dict() for loader in self.loaders]
        assert states == states[:1] * self.world
        spot, coming = self.model.spot, self.model.coming
        assert (states[0]["epoch"], states[0]["consumed"]) == spot[:2]
        assert states[0].get("batch", spot[2]) == spot[2]
        assert {iter(loader).epoch for loader in self.loaders} == {coming[0]}
        assert {len(iter(loader)) for loader in self.loaders} == {self.model.left(coming)}
        for reader, iterators in self.iterators.items():
            there = reader.spot or coming
            left = 0 if reader.over else self.model.left(there)
            assert {(iterator.epoch, len(iterator)) for iterator in iterators} == {(there[0], left)}


def run_at_random(count: int, seed: int, folder: Path, caught: list[warnings.WarningMessage]) -> None:
    """Does `count` jobs of 40 calls each."""
    sets = [make_plain_set(folder, 37), {make_plain_set(folder, 17): 2, make_plain_set(folder, 5): 1}]
    for number in range(count):
        job, calls = Job(sets[number % 3 == 2], seed + number, caught), 0
        try:
            for calls in range(40):  # noqa: B007
                job.step()
                job.check()
            job.end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed + number}, call {calls}: {error}") from None
        finally:
            for loader in job.loaders:
                loader.close()


def test_random_calls_lose_and_repeat_no_sample_beyond_the_table(tmp_path: Path) -> None:
    count, seed = int(os.environ.get("SHARDIO_TEST_PLACES", "30")), random.randrange(10**6)
    print(f"seed {seed}")  # of the first job
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_at_random(count, seed, tmp_path, caught)


def test_set_epoch_warns_of_nothing_after_an_error_in_the_epoch_that_came_again(
    make_set: Callable[..., Path], closing: ExitStack
) -> None:
    failing: list[Exception] = []

    def transform(images: torch.Tensor) -> torch.Tensor:
        if failing:
            raise failing.pop()
        return images

    loader = closing.enter_context(ShardLoader(make_set(20), 4, device="cpu", transform=transform))
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    failing.append(ArithmeticError())
    with pytest.raises(ArithmeticError):
        next(iter(loader))
    loader.set_epoch(0)
    assert loader.state_dict()["consumed"] == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "transform",
    [None, Compose([RandomCrop(4), Normalize("imagenet")]), lambda images: images + torch.rand(1).item()],
    ids=["none", "crops", "a function that draws"],
)
def test_peek_returns_what_comes_next_in_memory_of_its_own_and_moves_nothing(
    transform: Any, device: str, make_set: Callable[..., Path]
) -> None:
    def seen(batch: tuple[torch.Tensor, ...]) -> list[Any]:
        return [part.cpu().tolist() for part in batch]

    with ShardLoader(make_set(20), 8, device=device, transform=transform, tail="pad", return_indices=True) as loader:
        for _ in range(2):
            iterator = iter(loader)
            for left in range(3, 0, -1):
                before = loader.state_dict(), loader.num_padded, iter(loader).epoch
                first, second = loader.peek(), loader.peek()
                expected = seen(first)
                assert seen(second) == expected
                for part in first:
                    part.zero_()
                assert (loader.state_dict(), loader.num_padded, iter(loader).epoch) == before
                assert seen(next(iterator)) == expected
                assert len(iterator) == left - 1
            expected = seen(loader.peek())  # of the next epoch
            assert list(iterator) == []
            assert seen(loader.peek()) == expected
    with pytest.raises(RuntimeError, match="closed"):
        loader.peek()


class Scene:
    """A loader of 12 batches in an epoch; a loop over it that has received 3, unless their state was loaded."""

    def __init__(self, make: Callable[..., ShardLoader], loads: bool) -> None:
        self.loader, self.make, self.kept = make(), make, []
        self.loop = self.begun(3)
        self.state = self.loader.state_dict()
        if loads:
            self.loader = make()
            self.loader.load_state_dict(self.state)

    def begun(self, count: int) -> Any:
        iterator = iter(self.loader)
        for _ in range(count):
            next(iterator)
        return iterator

    def keep(self, count: int) -> None:
        self.kept.append(self.begun(count))

    def zip(self) -> None:
        with self.make(epoch_batches=3, tail="drop") as other:
            self.loader.set_epoch(0)
            assert len(list(zip(self.loader, other, strict=False))) == 3


# The first cells of the tables in docs/guide/resume.md, and what they mean.
IN_THE_LOOP: dict[str, Callable[[Scene], object]] = {
    "`loader.peek()`": lambda its: its.loader.peek(),
    "the loop is left: `break`, an exception, Ctrl-C": lambda its: delattr(its, "loop"),
    "the loop receives its last batch": lambda its: [next(its.loop) for _ in range(9)],
    "the loop ends": lambda its: list(its.loop),
    "the loop is of `zip(loader, other)`, and `other` ends": Scene.zip,
    "`next(iter(loader))`": lambda its: its.begun(1),
    "another iterator receives one batch, and is kept": lambda its: its.keep(1),
    "`set_epoch(5)`, and the loop's next batch": lambda its: (its.loader.set_epoch(5), next(its.loop)),
    "`load_state_dict(state)`, and the loop's next batch": lambda its: (
        its.loader.load_state_dict(its.state),
        next(its.loop),
    ),
}
AFTER_A_LOAD: dict[str, Callable[[Scene], object]] = {
    "`set_epoch(1)`": lambda its: its.loader.set_epoch(1),
    "one batch, and the iterator is dropped or kept": lambda its: its.begun(1),
    "two batches": lambda its: its.begun(2),
}
OF_THE_PAGE = re.findall(
    r"\| what happens \|.*\n\|---.*\n((?:\|.*\n)+)", (ROOT / "docs/guide/resume.md").read_text(encoding="utf-8")
)
TABLES = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in OF_THE_PAGE]


@pytest.mark.parametrize("options", [{}, {"epoch_batches": 12}, {"rank": 2, "world_size": 3, "tail": "short"}])
def test_the_table_of_the_guide_is_true(
    options: dict[str, Any], make_set: Callable[..., Path], closing: ExitStack
) -> None:
    size = 1 if "rank" in options else 3

    def make(**more: Any) -> ShardLoader:
        path = make_set(36)
        return closing.enter_context(ShardLoader(path, size, device="cpu", **{**options, **more}))

    wrong = []
    caught = closing.enter_context(warnings.catch_warnings(record=True))
    warnings.simplefilter("always")
    for does, rows in zip((IN_THE_LOOP, AFTER_A_LOAD), TABLES, strict=True):
        assert sorted(does) == sorted(cells[0] for cells in rows)
        for what, state, begins in rows:
            its = Scene(make, does is AFTER_A_LOAD)
            caught.clear()  # as the scene before was dropped
            does[what](its)
            found = its.loader.state_dict()
            there = iter(its.loader)
            consumed = found["consumed"] - (found["epoch"] * 36 if "epoch_batches" in options else 0)
            said = f"epoch {found['epoch']}, batch {consumed // 3}" + ", warns" * len(caught)
            if (said, f"epoch {there.epoch}, batch {12 - len(there)}") != (state, begins):
                wrong.append((what, said, there.epoch, 12 - len(there)))
    assert not wrong
