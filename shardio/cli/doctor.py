"""`shardio doctor`."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from shardio.cli.options import json_option
from shardio.cli.output import say, show
from shardio.errors import printable
from shardio.system.amounts import bytes_text, counted

if TYPE_CHECKING:
    from shardio.measure.advice import Advice, CacheFacts, MachineFacts, SetFacts

T = TypeVar("T")

_WIDTH = 80
# A filesystem that answers sooner needs no word.
_TELL_SECONDS = 5.0


@click.command(short_help="Show what would slow or break a job here.")
@click.argument("out", required=False)
@click.argument("cache", required=False)
@json_option
def doctor(out: str | None, cache: str | None, as_json: bool) -> None:
    """Say what on this machine would break or slow training or converting, the worst first, and how to cure it.

    OUT is a set that a job is to read, CACHE the folder on this machine that it is to be staged to. Nothing is changed.
    The exit code is 1 if there is an error: something would break.
    """
    from shardio.measure import advice, facts
    from shardio.sets.names import shown

    silent: list[Advice] = []

    def looked(what: str, look: Callable[[], T], lines: Callable[[T], Iterable[str]]) -> T | None:
        """Prints what was seen, and returns it; None if nothing answered."""
        with _telling(what):
            try:
                seen = facts.within(facts.ANSWER_SECONDS, what, look)
            except TimeoutError as error:
                silent.append(_silent(error))
                return None
        if not as_json:
            show(lines(seen))
        return seen

    machine = looked("the machine", facts.look_at_machine, _machine_lines)
    shards = None if out is None else looked(shown(out), partial(facts.look_at_set, out), _set_lines)
    copies = None if cache is None else looked(shown(cache), partial(facts.look_at_cache, cache), _cache_lines)
    found = [*silent, *advice.advise(machine, shards, copies)]
    if as_json:
        parts = {"machine": machine, "set": shards, "cache": copies}
        known = {name: None if part is None else advice.as_dict(part) for name, part in parts.items()}
        show({**known, "advice": [advice.as_dict(one) for one in found]})
    else:
        show(_advice_lines(found))
    if advice.would_break(found):
        raise SystemExit(1)


def _silent(error: TimeoutError) -> Advice:
    from shardio.measure.advice import Advice

    return Advice(
        "error",
        f"{error.filename}: {error.strerror}",
        "jobs that read there wait, and cannot be ended",
        "look at the mount (findmnt, dmesg), or use another folder",
    )


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Says after some seconds what the command is looking at."""
    timer = threading.Timer(_TELL_SECONDS, say, [f"shardio: still looking at {what}"], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _machine_lines(facts: MachineFacts) -> Iterator[str]:
    yield from _fact("versions", ", ".join(f"{name} {version or '-'}" for name, version in facts.versions.items()))
    yield from _fact("kernels", ", ".join(f"{name} by {kernel}" for name, kernel in facts.kernels.items()))
    yield from _fact("cores", f"{facts.cores} of {facts.cores_of_machine}; NUMA nodes {facts.numa_nodes}")
    huge = f"; huge pages: {facts.huge_pages}" if facts.huge_pages else ""
    yield from _fact("memory", f"{_bytes(facts.memory_left)} left; /dev/shm {_bytes(facts.shm_free)} free{huge}")
    yield from _fact(
        "limits",
        f"files {_count(facts.descriptors)}, mappings {_count(facts.mappings)} more, "
        f"address space {_bytes(facts.address_space, 'unlimited')}, locked memory "
        f"{_bytes(facts.locked_memory, 'unlimited')}",
    )
    sees = {None: "", True: ", torch sees a GPU", False: ", torch sees no GPU"}[facts.torch_sees_gpu]
    driver = "driver here" if facts.has_driver else "no driver"
    yield from _fact("CUDA", f"torch for {facts.torch_cuda or 'the CPU'}, {driver}{sees}")
    for name, rate in facts.gpus.items():
        yield from _fact("", f"{name}: {bytes_text(rate)}/s from pinned memory")


def _set_lines(facts: SetFacts) -> Iterator[str]:
    yield from _fact("set", f"{facts.path} on {facts.filesystem or '?'}, {_bytes(facts.free_nbytes)} free")
    if facts.reading is None:
        return
    from shardio.reading.choose import choose

    resident = facts.reading.resident_share
    share = "share in the page cache unknown" if resident is None else f"{resident:.0%} in the page cache"
    yield from _fact("", f"{bytes_text(facts.nbytes)} in {counted(facts.num_files, 'file')}; {facts.split}: {share}")
    choice = choose(facts.reading)
    yield from _fact("reader", f"{choice.engine}: {choice.reason}")
    if facts.reads_per_second is not None:
        yield from _fact("disk", f"{bytes_text(facts.reads_per_second)}/s in random samples, past the page cache")


def _cache_lines(facts: CacheFacts) -> Iterator[str]:
    locks = {None: "locks unknown", True: "locks work", False: "no locks"}[facts.has_locks]
    yield from _fact("cache", f"{facts.path} on {facts.filesystem or '?'}, {_bytes(facts.free_nbytes)} free, {locks}")


def _advice_lines(found: Sequence[Advice]) -> Iterator[str]:
    if not found:
        yield "nothing found that would break or slow a job"
    for advice in found:
        yield from _wrapped(f"{advice.severity}: ", f"{advice.found}: {advice.follows}", "  ")
        yield from _wrapped("  cure: ", advice.cure, "        ")


def _fact(name: str, text: str) -> Iterator[str]:
    return _wrapped(f"{name:<10}", text, " " * 10)


def _wrapped(first: str, text: str, rest: str) -> Iterator[str]:
    """Yields lines of 80 columns. Words stay whole: they may be paths and parts of commands."""
    yield from textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _bytes(count: int | None, unknown: str = "?") -> str:
    return unknown if count is None else bytes_text(count)


def _count(count: int | None) -> str:
    return "unlimited" if count is None else f"{count:,}"
