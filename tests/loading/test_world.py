"""Launchers tell which rank this process is; arguments and torch come before them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shardio.errors import LaunchError
from shardio.loading.world import World, find_world, min_local_ranks, warn_if_alone

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "11", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2"}
HOROVOD = {"HOROVOD_RANK": "9", "HOROVOD_SIZE": "13", "HOROVOD_LOCAL_RANK": "5"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "10", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
PMI = {"PMI_RANK": "8", "PMI_SIZE": "9", "MPI_LOCALRANKID": "4"}
# The innermost first: each may have been started by those behind it, which then have other numbers of processes.
IN_ORDER = [
    (TORCHRUN, World(5, 11, 1, "torchrun")),
    (HOROVOD, World(9, 13, 5, "Horovod")),
    (OPEN_MPI, World(7, 10, 3, "Open MPI")),
    (PMI, World(8, 9, 4, "PMI")),
    (SLURM, World(6, 8, 2, "SLURM")),
]


def fake_torch() -> SimpleNamespace:
    """torch as it answers in rank 2 of 3."""
    answers = {"is_available": True, "is_initialized": True, "get_rank": 2, "get_world_size": 3}
    return SimpleNamespace(
        distributed=SimpleNamespace(**{name: partial(int, value) for name, value in answers.items()})
    )


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setitem(sys.modules, "torch", torch := fake_torch())
    return torch.distributed


def nested(first: int) -> dict[str, str]:
    """The variables of this launcher, started by all those behind it."""
    return {name: value for variables, _ in reversed(IN_ORDER[first:]) for name, value in variables.items()}


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {other: value for other, value in environ.items() if other != name}


BATCH_SCRIPT = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}
ELASTIC = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
# mpirun with fewer processes than its allocation has nodes starts its helpers by srun.
HELPER = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0"}
PTY = {**SLURM, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40123"}


@pytest.mark.parametrize(
    ("arguments", "environ", "world"),
    [
        ((), {}, World(0, 1, None, "default")),
        *(((), environ, world) for environ, world in IN_ORDER),
        *(((), nested(first), world) for first, (_, world) in enumerate(IN_ORDER)),
        *(
            ((), without(environ, list(environ)[2]), dataclasses.replace(world, local_rank=None))
            for environ, world in IN_ORDER
        ),
        # A single variable is no launcher.
        *(
            ((), {name: value}, World(0, 1, None, "default"))
            for environ, _ in IN_ORDER[1:]
            for name, value in environ.items()
        ),
        ((), {"LOCAL_RANK": "1"}, World(0, 1, 1, "default")),
        # Half of a launcher does not hide the next: many batch scripts export one of these.
        ((), {"RANK": "7", **OPEN_MPI}, World(7, 10, 3, "Open MPI")),
        ((), {"WORLD_SIZE": "8", **SLURM}, World(6, 8, 2, "SLURM")),
        ((), {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"}, World(3, 4, 1, "PMI")),
        ((), {"PMI_RANK": "3", "PMI_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, World(3, 4, 1, "PMI")),
        ((), {**HELPER, **OPEN_MPI}, World(7, 10, 3, "Open MPI")),
        ((), BATCH_SCRIPT, World(0, 1, None, "default")),
        ((), {**BATCH_SCRIPT, **SLURM}, World(6, 8, 2, "SLURM")),
        ((), {**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2"}, World(6, 8, 2, "PMI")),
        # A shell of srun --pty is one process, and what it starts has the variables of its launcher.
        ((), PTY, World(0, 1, None, "default")),
        ((), {**PTY, **OPEN_MPI}, World(7, 10, 3, "Open MPI")),
        # A torchrun under another launcher numbers its processes itself.
        *(
            ((), {**SLURM, **ELASTIC, "WORLD_SIZE": size}, World(0, int(size), 0, "torchrun"))
            for size in ("1", "8", "64")
        ),
        # Arguments are believed whatever a launcher says, and its local rank only if it started this process.
        ((7, 10), OPEN_MPI, World(7, 10, 3, "arguments")),
        ((1, 2), OPEN_MPI, World(1, 2, None, "arguments")),
        ((1, 2), {}, World(1, 2, None, "arguments")),
        ((1, 2), {**TORCHRUN, "RANK": "fifth"}, World(1, 2, 1, "arguments")),
        ((1, 2), {**TORCHRUN, "RANK": "11"}, World(1, 2, 1, "arguments")),
        ((1, 2), {**PMI, "PMI_SIZE": ""}, World(1, 2, None, "arguments")),
    ],
)
def test_a_process_without_torch_distributed_asks_arguments_and_launchers(
    arguments: tuple[int, ...], environ: dict[str, str], world: World
) -> None:
    assert find_world(*arguments, environ=environ) == world


@pytest.mark.parametrize(
    ("arguments", "environ", "local_rank"),
    [
        ((), {}, None),
        ((), OPEN_MPI, None),
        ((), {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, 1),
        ((), {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 1),  # Lightning's own launcher sets no RANK
        # RANK may be the node's, from which a script has made the rank that it told torch.
        ((), {"RANK": "0", "WORLD_SIZE": "2"}, None),
        ((), {"RANK": "x"}, None),
        ((), {**TORCHRUN, **SLURM}, 1),
        ((), {**PMI, **SLURM, "RANK": "9"}, None),
        # One task of srun that spawns three processes: all of them inherit its variables.
        ((), {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, None),
        ((), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "1"}, 1),
        ((0, 4), {**TORCHRUN, **PMI}, 1),
        ((0, 2), {"LOCAL_RANK": "1"}, 1),
    ],
)
def test_torch_distributed_comes_before_launchers_and_after_arguments(
    arguments: tuple[int, ...], environ: dict[str, str], local_rank: int | None, distributed: SimpleNamespace
) -> None:
    rank, world_size = arguments or (2, 3)
    source = "arguments" if arguments else "torch.distributed"
    assert find_world(*arguments, environ=environ) == World(rank, world_size, local_rank, source)


def test_torch_distributed_that_is_not_in_use_says_nothing_and_torch_is_not_imported(
    distributed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("is_initialized", "is_available"):
        setattr(distributed, name, int)
        assert find_world(environ=TORCHRUN) == IN_ORDER[0][1]
    monkeypatch.delitem(sys.modules, "torch")
    assert find_world(environ=TORCHRUN) == IN_ORDER[0][1]
    assert "torch" not in sys.modules


def test_a_real_process_group_is_asked() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "2"}
    assert find_world(environ=environ).source == "torchrun"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert find_world(environ=environ) == World(0, 1, 2, "torch.distributed")
    finally:
        torch.distributed.destroy_process_group()
    assert find_world(environ=environ).source == "torchrun"


TASK = "import os, sys; [os.open(path, os.O_RDWR) for path in sys.argv[1:]]; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("has_terminal", "world_size"), [(True, 1), (False, 8)])
def test_srun_in_a_shell_of_srun_with_a_terminal_is_a_launcher(has_terminal: bool, world_size: int) -> None:
    ends = os.openpty()
    paths = [os.ttyname(ends[1])] if has_terminal else []
    with subprocess.Popen(
        [sys.executable, "-c", TASK, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as task:
        assert task.stdout is not None
        task.stdout.readline()
        assert find_world(environ={**PTY, "SLURM_TASK_PID": str(task.pid)}).world_size == world_size
        task.communicate()
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("environ", "others", "names"),
    [
        (TORCHRUN, (), "1/11 of the set as rank 5 of 11, by RANK and WORLD_SIZE"),
        (SLURM, (), "1/8 of the set as rank 6 of 8, by SLURM_PROCID and SLURM_STEP_NUM_TASKS"),
        (SLURM, ("jax not up",), "1/8 of the set"),
        (SLURM, ("jax",), ""),
        (SLURM, ("torch",), ""),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (), ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (), ""),
        ({}, (), ""),
    ],
)
def test_a_process_that_is_one_of_many_by_its_environment_alone_is_told(
    environ: dict[str, str], others: tuple[str, ...], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = find_world(environ=environ)
    is_up = SimpleNamespace(is_initialized=lambda: "jax" in others)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(distributed=is_up) if others else SimpleNamespace())
    if "torch" in others:
        monkeypatch.setitem(sys.modules, "torch", fake_torch())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_if_alone(world, environ)
    assert [names in str(one.message) for one in told] == ([True] if names else [])


def test_rank_and_world_size_that_are_given_need_no_word() -> None:
    warn_if_alone(find_world(1, 2, SLURM), SLURM)


Arguments = tuple[int | None, int | None]
NONE: Arguments = (None, None)
REFUSED: list[tuple[Arguments, dict[str, str], str]] = [
    # torch will believe one of these alone: one of many cannot be 0 of 1.
    *((NONE, {name: "5"}, f"default says rank 0 of 1, but found {name}=5") for name in ("RANK", "WORLD_SIZE")),
    # What torch would believe contradicts the launcher.
    *(
        (NONE, {**environ, **change}, f"{world.source} says rank {world.rank} of {world.world_size}, but found ")
        for environ, world in IN_ORDER[1:]
        for change in ({"RANK": "1"}, {"WORLD_SIZE": "12"})
    ),
    *(
        (
            NONE,
            {**environ, "RANK": "0", "WORLD_SIZE": "1"},
            f"torchrun says rank 0 of 1, but found {world.source} rank {world.rank} of {world.world_size}: ",
        )
        for environ, world in IN_ORDER[1:]
    ),
    # MPI does not know of srun's tasks.
    (
        NONE,
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", **SLURM},
        "Open MPI says rank 0 of 1, but found SLURM rank 6 of 8: ",
    ),
    # Launchers of equal size must agree in the rank.
    (NONE, {"PMI_RANK": "0", "PMI_SIZE": "8", **SLURM}, "PMI says rank 0 of 8, but found SLURM rank 6 of 8: "),
    *(
        (NONE, {**environ, name: text}, f"an integer in {name}, which {world.source} sets; found {text!r}")
        for environ, world in IN_ORDER
        for name, text in zip(environ, ("", "1.0", "4(x2)"), strict=True)
    ),
    *(
        (half, TORCHRUN, f"rank and world_size together, found rank={half[0]}, world_size={half[1]}")
        for half in ((0, None), (None, 1))
    ),
    *(
        case
        for rank, size in ((4, 4), (-1, 4), (0, 0))
        for case in (
            ((rank, size), {}, f"found rank {rank} of {size} (from arguments)"),
            *(
                (
                    NONE,
                    dict(zip(environ, (str(rank), str(size)), strict=False)),
                    f"found rank {rank} of {size} (from {world.source})",
                )
                for environ, world in IN_ORDER
            ),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "environ", "words"), REFUSED)
def test_contradictions_and_what_is_no_rank_are_refused(
    arguments: Arguments, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(words)) as caught:
        find_world(*arguments, environ=environ)
    assert isinstance(caught.value, ValueError)


LOCAL_SIZES = {
    "torchrun": ["LOCAL_WORLD_SIZE"],
    "Horovod": ["HOROVOD_LOCAL_SIZE"],
    "Open MPI": ["OMPI_COMM_WORLD_LOCAL_SIZE"],
    "PMI": ["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"],
    "SLURM": ["SLURM_STEP_TASKS_PER_NODE"],
}


@pytest.mark.parametrize(("environ", "world"), IN_ORDER)
def test_the_launcher_tells_how_many_ranks_a_node_has_at_least(environ: dict[str, str], world: World) -> None:
    assert world.local_rank is not None
    up_to_this = world.local_rank + 1
    assert min_local_ranks(world, environ) == up_to_this
    for name in LOCAL_SIZES[world.source]:
        for text, least in (("7(x2),3", 7), ("99", 99), ("x", 0), ("1", 0)):
            expected = min(max(least, up_to_this), world.world_size)
            assert min_local_ranks(world, {**environ, name: text}) == expected
            # An outer launcher that started this one has a step of its own.
            outer = {} if world.source == "SLURM" else {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}
            assert min_local_ranks(world, {**outer, **environ, name: text}) == expected
    if world.source != "torchrun":  # a launcher of another world does not tell
        assert min_local_ranks(World(0, 4, None, "arguments"), {**environ, LOCAL_SIZES[world.source][0]: "3"}) == 1
