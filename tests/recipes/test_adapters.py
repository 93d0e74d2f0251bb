"""Recipes of docs/integrations.md for large packages: the extra `adapters` has them. Without it, these are skipped."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import BLOCKS, RECORDER
from pictures import sample_pixels
from places import ROOT

from shardio import ShardLoader, ShardWriter

SHAPE = (6, 5, 3)
NUM_TRAIN, BATCH_SIZE, EPOCHS = 520, 32, 2
PER_EPOCH = NUM_TRAIN // BATCH_SIZE

# A gathering thread of torch's gloo may end badly at the interpreter's end: tests/recipes/test_integrations.py.
LAST = "\nimport os\nos._exit(0)\n"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the page's reader has it, with the set in out/, where a sample's label is its index."""
    with ShardWriter(tmp_path / "out", SHAPE, classes=[f"c{i}" for i in range(NUM_TRAIN)]) as writer:
        for split, count in (("train", NUM_TRAIN), ("val", 65)):
            for i in range(count):
                writer.append(sample_pixels(i, SHAPE), i, split=split)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: str, *, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    Path("train.py").write_text(script + LAST, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": os.getcwd()}
    return subprocess.run(
        [sys.executable, *torchrun, "train.py"],
        env={**os.environ, **settings, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def trained_on(rank: int = 0) -> list[list[int]]:
    """The batches on which a rank has trained since this was last asked."""
    path = Path(f"steps-{rank}.jsonl")
    lines = path.read_text(encoding="ascii").splitlines()
    path.unlink()
    return [json.loads(line) for line in lines]


def undisturbed(rank: int, ranks: int) -> list[list[int]]:
    options: dict[str, Any] = {"device": "cpu", "rank": rank, "world_size": ranks}
    with ShardLoader("out/", BATCH_SIZE, **options) as loader:
        return [labels.tolist() for _ in range(EPOCHS) for _, labels in loader]


def check_resumed(script: str, stop: int, ranks: int = 1) -> None:
    """Kills the script before the step `stop`, and again: what each checkpoint goes on with is an unbroken run."""
    kept: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = EPOCHS * (PER_EPOCH // ranks)
    for kill in (stop, stop // 4, 0):
        ended = run(script, ranks=ranks, STOP_AFTER=str(kill))
        assert (ended.returncode == 0) == (kill == 0), ended.stderr
        steps = [trained_on(rank) for rank in range(ranks)]
        # Where it went on is told by its first batch.
        first = undisturbed(0, ranks).index(steps[0][0])
        assert first > 0 or kill == stop
        kept = [before[:first] + after for before, after in zip(kept, steps, strict=True)]
    assert kept == [undisturbed(rank, ranks)[:total] for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "accumulated", "stop"), [(1, 1, 23), (1, 2, 24), (2, 1, 13)])
def test_a_trainer_of_transformers_goes_on_exactly_after_being_killed(
    ranks: int, accumulated: int, stop: int, reader: Path
) -> None:
    pytest.importorskip("transformers")
    (block,) = BLOCKS["Hugging Face Transformers"]
    more = f"    gradient_accumulation_steps={accumulated},\n"
    if ranks > 1:
        more += "    use_cpu=True,\n    ddp_backend='gloo',\n"
    script = block.replace("    save_steps=3,\n", f"    save_steps=3,\n{more}")
    script = script.replace('eval_strategy="epoch"', 'eval_strategy="no"')
    check_resumed(RECORDER + script, stop, ranks)


def test_a_trainer_of_transformers_evaluates_and_trains(reader: Path) -> None:
    pytest.importorskip("transformers")
    (block,) = BLOCKS["Hugging Face Transformers"]
    ended = run(block + "    print(trainer.evaluate()['eval_loss'], trainer.state.global_step)")
    assert ended.returncode == 0, ended.stderr
    loss, steps = ended.stdout.splitlines()[-1].split()
    assert 0 < float(loss) < 100
    assert int(steps) == EPOCHS * PER_EPOCH


RECORDING = """
import json, os
steps = []

def recorded(labels):
    steps.append(labels.tolist())
    if len(steps) == int(os.environ["STOP_AFTER"]):
        os._exit(9)
    with open("steps-0.jsonl", "a", encoding="ascii") as file:
        file.write(json.dumps(steps[-1]) + "\\n")
    return labels
"""


def test_a_training_in_jax_goes_on_exactly_after_being_killed(reader: Path) -> None:
    pytest.importorskip("jax")
    (block,) = BLOCKS["JAX and NumPy"]
    script = RECORDING + block.replace("labels.numpy()", "recorded(labels).numpy()")
    assert script != RECORDING + block
    check_resumed(script, 23)


def views(images: torch.Tensor) -> Any:
    """A JAX array of the batch's own memory."""
    jax = pytest.importorskip("jax")
    array = jax.dlpack.from_dlpack(images.permute(0, 2, 3, 1))
    assert array.unsafe_buffer_pointer() == images.data_ptr(), "JAX has copied the batch"
    return array


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arrays_of_jax_keep_their_batches_and_give_them_back(reader: Path) -> None:
    pytest.importorskip("jax")
    with ShardLoader("out/", BATCH_SIZE, device="cpu", prefetch=1) as loader:
        held = [(views(images), images.permute(0, 2, 3, 1).numpy().copy()) for images, _ in loader]
        for _ in range(3):
            for images, _ in loader:
                del images
        for array, pixels in held:
            assert np.array_equal(array, pixels)
        assert len({array.unsafe_buffer_pointer() for array, _ in held}) == PER_EPOCH
        del array, held
        gc.collect()
        seen = set()
        for _ in range(3):
            for images, _ in loader:
                seen.add(views(images).unsafe_buffer_pointer())
                del images
        # What nothing holds any more is used again.
        assert len(seen) <= PER_EPOCH + 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_batch_stays_what_it_is_while_jax_still_computes(reader: Path) -> None:
    jax = pytest.importorskip("jax")

    @jax.jit
    def slow(images: Any) -> Any:
        scores = images.reshape(len(images), -1).astype("float32")
        for _ in range(6):
            scores = scores @ (scores.T @ scores) / 1e7
        return scores.sum(), images.astype("int32").sum()

    with ShardLoader("out/", BATCH_SIZE, device="cpu", prefetch=1) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            # Dispatched, and not waited for, while the loader gathers the next batches.
            pending = [(slow(views(images))[1], int(images.sum())) for images, _ in loader]
            for found, expected in pending:
                assert int(found) == expected


def test_numpy_takes_a_batch_without_a_copy(reader: Path) -> None:
    with ShardLoader("out/", BATCH_SIZE, device="cpu") as loader:
        images, _ = next(iter(loader))
        for array in (images.numpy(), np.from_dlpack(images)):
            assert array.ctypes.data == images.data_ptr()
