"""Without a garbage collector, every object of a loader is freed when the last name of it goes, however it was left."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import ShardLoader
from shardio.augment import Compose, Normalize, PerSample, RandomCrop
from shardio.reading.reader import MappedReader

Leave = Callable[[ShardLoader], object]


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def living() -> dict[int, Any]:
    """The objects of shardio's types, by their addresses."""
    objects = [one for one in gc.get_objects() if str(type(one).__module__).startswith("shardio.")]
    return {id(one): one for one in objects if not isinstance(one, type) and type(one).__weakrefoffset__}


def left_behind(before: dict[int, weakref.ref[Any]]) -> list[str]:
    """The types of the objects that are alive and were not alive before."""
    deadline = time.monotonic() + 5  # threads may be about to let go of their last batch
    while True:
        found = [one for place, one in living().items() if place not in before or before[place]() is not one]
        if not found or time.monotonic() > deadline:
            return [type(one).__name__ for one in found]
        del found
        time.sleep(0.01)


def fail_once(kind: type[BaseException], step: int) -> Callable[[torch.Tensor], torch.Tensor]:
    calls = count(1)

    def function(images: torch.Tensor) -> torch.Tensor:
        if next(calls) == step:
            raise kind("here")
        return images

    return function


def fail_from_another(image: torch.Tensor) -> torch.Tensor:
    try:
        raise ArithmeticError
    except ArithmeticError:
        raise LookupError from None


def raise_in_the_loop(loader: ShardLoader) -> None:
    for _ in loader:
        raise ArithmeticError


def keep_the_iterator(loader: ShardLoader) -> Any:
    iterator = iter(loader)
    next(iterator)
    return iterator


def close_and_go_on(loader: ShardLoader) -> None:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    next(iterator)


def peek_and_look(loader: ShardLoader) -> None:
    for _ in loader:
        loader.peek()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            next(iter(loader))


def two_iterators(loader: ShardLoader) -> None:
    for _ in zip(loader, islice(loader, 2), strict=False):
        pass


def ways() -> dict[str, tuple[Leave, dict[str, Any]]]:
    """Ways of leaving an iterator, each with options of the loader."""
    return {
        "not begun": (iter, {}),
        "read to its end": (list, {}),
        "break": (lambda loader: next(iter(loader)), {}),
        "an error in the loop": (raise_in_the_loop, {}),
        "an error in the transform": (list, {"transform": fail_once(ArithmeticError, 3)}),
        "Ctrl-C in the first batch": (list, {"transform": fail_once(KeyboardInterrupt, 1)}),
        "an iterator that lives longer than its loader": (keep_the_iterator, {}),
        "closed in mid-epoch": (close_and_go_on, {}),
        "peek(), and next(iter(loader)) in the loop": (peek_and_look, {}),
        "two iterators": (two_iterators, {}),
        "dataset and sampler": (lambda loader: (loader.dataset, loader.sampler), {}),
        "crops": (lambda loader: next(iter(loader)), {"transform": Compose([RandomCrop(4), Normalize("imagenet")])}),
        "a crop that does not fit": (list, {"transform": RandomCrop(64)}),
        "an error in a transform of single samples": (list, {"transform": PerSample(fail_from_another)}),
        "a damaged shard": (list, {"check": "sample"}),
    }


@pytest.mark.parametrize(
    ("device", "prefetch"), [("cpu", 0), ("cpu", 4), pytest.param("cuda", 4, marks=pytest.mark.gpu)]
)
def test_a_loader_is_freed_without_a_collection_however_its_iterator_is_left(
    device: str,
    prefetch: int,
    make_set: Callable[..., Path],
    no_collections: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, out = MappedReader.read, make_set(61)
    monkeypatch.setattr(MappedReader, "read", lambda *words: (time.sleep(0.002), read(*words)))  # some wait to be read
    ShardLoader(out, 8, device="cpu").close()  # which fills what is cached
    table, found = ways(), {}
    before = {place: weakref.ref(one) for place, one in living().items()}
    for how, (leave, options) in table.items():
        if how == "a damaged shard":
            shard = min(out.glob("*0.npy"))
            shard.write_bytes(shard.read_bytes()[:-30] + bytes(30))
        with suppress(BaseException):
            leave(ShardLoader(out, 8, device=device, prefetch=prefetch, num_threads=2, **options))
        if names := left_behind(before):
            found[how] = names
    assert not found


class Cycle:
    def __init__(self, *contents: object) -> None:
        self.contents = (self, *contents)


def collect_and_go_on() -> None:
    gc.collect()
    time.sleep(1)


@pytest.mark.parametrize("whole", [False, True], ids=["an iterator", "a loader"])
def test_an_interrupt_of_a_collection_that_frees_it_is_raised(
    whole: bool, make_set: Callable[..., Path], no_collections: None
) -> None:
    loader: ShardLoader | None = ShardLoader(make_set(61), 8, device="cpu", num_threads=2)
    cycle = Cycle(keep_the_iterator(loader), loader if whole else None)
    # The collection calls this before finalizers. It takes most of a second, and runs no line of Python.
    slow = weakref.ref(cycle, partial(dict.fromkeys, range(8_000_000)))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    del cycle
    if whole:
        loader = None
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            collect_and_go_on()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert slow() is None
    if loader is not None:
        assert len(list(loader)) == 7
    else:
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shardio")]


def test_a_loader_whose_last_thread_cannot_start_leaves_none(
    make_set: Callable[..., Path], no_collections: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "shardio-report":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="ulimit -u"):
        ShardLoader(make_set(20), 4, device="cpu", report_every=60)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shardio")]
