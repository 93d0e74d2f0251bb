"""`shardio doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from shardio.cli.options import json_option
from shardio.cli.output import show, wrapped
from shardio.errors import bytes_text, counted

if TYPE_CHECKING:
    from shardio.measure.doctor import Advice, CacheState, MachineState, SetState

T = TypeVar("T")


@click.command(short_help="Check this machine for what would end a job.")
@click.argument("out", required=False)
@click.argument("cache", required=False)
@json_option
def doctor(out: str | None, cache: str | None, as_json: bool) -> None:
    """Check this machine for what would end a job or run it on the CPU by mistake, with a cure for each finding.

    OUT is the set that a job will read, CACHE the folder that it will be staged to. The command changes nothing. Its
    exit code is 1 if a job would fail.
    """
    from shardio.measure import doctor
    from shardio.sets.names import shown

    silent: list[Advice] = []

    def looked(what: str, look: Callable[[], T], lines: Callable[[T], Iterable[str]]) -> T | None:
        """Returns look() and prints its lines; returns None if there is no answer in time."""
        try:
            state = doctor.within(what, look)
        except TimeoutError as error:
            silent.append(
                doctor.Advice(
                    "error",
                    f"{error.filename}: {error.strerror}",
                    "jobs that read there wait, and cannot be killed",
                    "check the mount (findmnt, dmesg), or use another folder",
                )
            )
            return None
        if not as_json:
            show(lines(state))
        return state

    machine = looked("the machine", doctor.look_at_machine, _machine_lines)
    shards = None if out is None else looked(shown(out), partial(doctor.look_at_set, out), _set_lines)
    copies = None if cache is None else looked(shown(cache), partial(doctor.look_at_cache, cache), _cache_lines)
    found = [*silent, *doctor.advise(machine, shards, copies)]
    if as_json:
        states = {"machine": machine, "set": shards, "cache": copies}
        known = {name: None if state is None else asdict(state) for name, state in states.items()}
        show({**known, "advice": [asdict(advice) for advice in found]})
    else:
        show(_advice_lines(found))
    if any(advice.severity == "error" for advice in found):
        raise SystemExit(1)


def _machine_lines(machine: MachineState) -> Iterator[str]:
    yield from _fact("versions", ", ".join(f"{name} {version or '-'}" for name, version in machine.versions.items()))
    yield from _fact("kernels", ", ".join(f"{name} by {kernel}" for name, kernel in machine.kernels.items()))
    yield from _fact("cores", f"{machine.cores} of {machine.cores_of_machine}")
    yield from _fact("memory", f"{_bytes(machine.memory_left)} left; /dev/shm {_bytes(machine.shm_free)} free")
    yield from _fact(
        "limits",
        f"files {_count(machine.descriptors)}, mappings {_count(machine.mappings_left)} more, "
        f"address space {_bytes(machine.address_space, 'unlimited')}",
    )
    driver = f"driver here, torch sees {'a' if machine.sees_gpu else 'no'} GPU" if machine.has_driver else "no driver"
    yield from _fact("CUDA", f"torch for {machine.torch_cuda or 'the CPU'}, {driver}")


def _set_lines(shards: SetState) -> Iterator[str]:
    size = f", {bytes_text(shards.nbytes)} in {counted(shards.num_files, 'file')}" if shards.num_files else ""
    yield from _fact("set", f"{shards.path} on {shards.filesystem or '?'}{size}")


def _cache_lines(cache: CacheState) -> Iterator[str]:
    yield from _fact("cache", f"{cache.path} on {cache.filesystem or '?'}, {_bytes(cache.free_nbytes)} free")


def _advice_lines(found: Sequence[Advice]) -> Iterator[str]:
    if not found:
        yield "nothing found that would end a job"
    for advice in found:
        yield from wrapped(f"{advice.found}: {advice.consequence}", f"{advice.severity}: ", "  ")
        yield from wrapped(advice.cure, "  cure: ", "        ")


def _fact(name: str, text: str) -> list[str]:
    return wrapped(text, f"{name:<10}", " " * 10)


def _bytes(count: int | None, unknown: str = "?") -> str:
    return unknown if count is None else bytes_text(count)


def _count(count: int | None) -> str:
    return "unlimited" if count is None else f"{count:,}"
