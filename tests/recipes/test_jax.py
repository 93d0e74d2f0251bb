"""The recipe of docs/integrations.md for JAX, and what is said there of batches that JAX and NumPy take."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import BLOCKS
from places import ROOT

from shardio import ShardLoader

NUM_TRAIN, BATCH_SIZE, EPOCHS = 520, 32, 2
PER_EPOCH = NUM_TRAIN // BATCH_SIZE


RECORDING = """
import json, os
steps = []

def recorded(loader):
    for batch in loader:
        steps.append(batch[1].tolist())
        if len(steps) == int(os.environ["STOP_AFTER"]):
            os._exit(9)
        with open(os.environ["STEPS"], "a", encoding="ascii") as file:
            file.write(json.dumps(steps[-1]) + "\\n")
        yield batch
"""


def slurm(rank: int, processes: int, job: int) -> dict[str, str]:
    """Returns the variables of a SLURM step on this machine. JAX takes the port from the number of the job."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def free_job() -> int:
    """Returns the number of a job for which JAX takes a port that is free."""
    while True:
        job = random.randrange(2**20)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("localhost", job % 2**12 + 2**16 - 2**12))
            return job


def trained_on(script: str, stop: int, devices: int, processes: int) -> list[list[list[int]]]:
    """Runs a script. Its first process is killed at the step `stop`, if that is not 0. Returns the batches that each
    has trained on."""
    Path("train.py").write_text(RECORDING + script, encoding="utf-8")
    settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    settings["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    job = free_job()
    running = []
    for rank in range(processes):
        # The first writes the checkpoints, and waits for all steps before; the others only begin steps.
        more = {"STEPS": f"steps-{rank}.jsonl", "STOP_AFTER": str(0 if rank else stop)}
        more |= slurm(rank, processes, job) if processes > 1 else {}
        with open(f"log-{rank}.txt", "w", encoding="utf-8") as log:
            environment = {**os.environ, **settings, **more}
            running.append(subprocess.Popen([sys.executable, "train.py"], env=environment, stdout=log, stderr=log))
    try:
        # The others wait for one that was killed, or end with an error.
        codes = [process.wait(timeout=120) for process in (running[:1] if stop else running)]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [9 if stop else 0] * len(codes), [Path(f"log-{rank}.txt").read_text() for rank in range(processes)]
    steps = []
    for rank in range(processes):
        file = Path(f"steps-{rank}.jsonl")
        lines = file.read_text(encoding="ascii").splitlines()
        file.unlink()
        steps.append([json.loads(line) for line in lines])
    return steps


@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_training_in_jax_goes_on_exactly_after_being_killed(devices: int, processes: int, reader: Path) -> None:
    pytest.importorskip("jax")
    (block,) = BLOCKS["JAX and NumPy"]
    script = block.replace("enumerate(loader)", "enumerate(recorded(loader))")
    assert script != block
    undisturbed = []
    for rank in range(processes):
        with ShardLoader("out/", BATCH_SIZE, device="cpu", rank=rank, world_size=processes) as loader:
            undisturbed.append([labels.tolist() for _ in range(EPOCHS) for _, labels in loader])
    kept: list[list[list[int]]] = [[] for _ in undisturbed]
    for stop in (23 // processes, 5, 0):
        steps = trained_on(script, stop, devices, processes)
        first = undisturbed[0].index(steps[0][0])
        assert first > 0 or not kept[0]
        for rank, of_rank in enumerate(steps):
            kept[rank] = kept[rank][:first] + of_rank
    assert kept == undisturbed


def taken(library: str, images: torch.Tensor) -> tuple[Any, int]:
    """Returns an array of NumPy or JAX, and its address."""
    view = images.permute(0, 2, 3, 1)
    if library == "numpy":
        found = np.from_dlpack(view)
        return found, found.ctypes.data
    array = pytest.importorskip("jax").dlpack.from_dlpack(view)
    return array, array.unsafe_buffer_pointer()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_arrays_of_others_are_the_batches_keep_them_and_give_them_back(library: str, reader: Path) -> None:
    pytest.importorskip(library)
    with ShardLoader("out/", BATCH_SIZE, device="cpu", prefetch=1) as loader:
        held = []
        for images, _ in loader:
            array, address = taken(library, images)
            assert address == images.data_ptr() == images.numpy().ctypes.data, "the batch was copied"
            held.append((array, images.permute(0, 2, 3, 1).numpy().copy(), address))
        for _ in range(3):
            for images, _ in loader:
                del images
        assert all(np.array_equal(array, pixels) for array, pixels, _ in held)
        assert len({address for *_, address in held}) == PER_EPOCH
        del array, held
        gc.collect()
        seen = set()
        for _ in range(3):
            for images, _ in loader:
                seen.add(taken(library, images)[1])
                del images
        # What nothing holds any more is used again.
        assert len(seen) <= PER_EPOCH + 4
