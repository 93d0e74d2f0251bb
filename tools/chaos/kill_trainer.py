#!/usr/bin/env python
"""Kills trainings by Hugging Face's Trainer at random moments, and starts them again until they have ended.

    python tools/chaos/kill_trainer.py [--rounds 20] [--seed 0]

The training is the recipe of docs/integrations.md, on one or two ranks, with gradients of one to three batches in a
step. All ranks are killed at once, also while a checkpoint is written. Every start must train on the batches of an
undisturbed run, from the checkpoint on that it took, and the weights at the end must be those of that run. Exit code 1
if they are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import attack
import numpy as np
import torch
from attack import Say, make_parser, verdict

from shardio import ShardWriter
from shardio.loading.iterator import LoaderIterator

NUM_SAMPLES, SHAPE = 530, (6, 5, 3)
BATCH_SIZE, EPOCHS = 32, 2  # those of the recipe
PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
# A rank must end by itself within so long.
PATIENCE_SECONDS = 120
# A kill comes so long after a batch, at most: as long as a checkpoint takes.
MOST_DELAY_SECONDS = 0.1
AFTER = "\nimport torch\nif args.process_index == 0:\n    torch.save(trainer.model.state_dict(), 'weights.pt')\n"


class Kind(NamedTuple):
    """Trainings that do the same, if nothing disturbs them."""

    ranks: int
    accumulated: int

    def script(self) -> str:
        section = PAGE.read_text(encoding="utf-8").partition("\n## Hugging Face Trainer\n")[2].partition("\n## ")[0]
        script = "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
        found = script.replace("**saving", f"**saving, gradient_accumulation_steps={self.accumulated}")
        assert found != script, "the recipe has other words now"
        return found.replace("trainer.train(", "took(newest)\n    trainer.train(") + AFTER

    def batches_at(self, step: int) -> int:
        """Returns how many batches a rank has had after so many steps of the optimizer."""
        per_epoch = NUM_SAMPLES // (BATCH_SIZE * self.ranks)
        epoch, steps = divmod(step, -(-per_epoch // self.accumulated))
        return epoch * per_epoch + steps * self.accumulated


class Whole(NamedTuple):
    """What an undisturbed training does."""

    batches: list[list[Any]]
    weights: dict[str, torch.Tensor]


@dataclass
class Counts(attack.Counts):
    kills: int = 0
    unfinished: int = 0
    """Kills that left a checkpoint without its mark."""
    resumed: int = 0
    """Starts that went on in the middle of an epoch."""

    def __str__(self) -> str:
        return (
            f"rounds {self.rounds}, kills {self.kills}, of these while a checkpoint was written {self.unfinished}, "
            f"resumed in the middle of an epoch {self.resumed}; violations {len(self.violations)}"
        )


def train(folder: Path, script: str, rank: int, environ: dict[str, str]) -> None:
    """Runs the recipe as one rank, and notes the checkpoint that it took, and each batch."""
    os.chdir(folder)
    os.environ.update(environ)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    log = os.open(f"batches-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

    def note(what: object) -> None:
        os.write(log, json.dumps(what).encode() + b"\n")

    original = LoaderIterator.__next__

    def noting(iterator: LoaderIterator) -> tuple[Any, ...]:
        batch = original(iterator)
        note(batch[1].tolist())
        return batch

    LoaderIterator.__next__ = noting  # type: ignore[method-assign, assignment]
    exec(script, {"__name__": "__main__", "took": lambda newest: note(newest and newest.name)})


def start(folder: Path, kind: Kind) -> list[int]:
    """Starts the ranks, and returns their processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {
            "ACCELERATE_USE_CPU": "true",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    script, pids = kind.script(), []
    for rank in range(kind.ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(kind.ranks)}
                train(folder, script, rank, {**world, **own} if kind.ranks > 1 else {})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)  # a thread of gloo's may still let go of a Python object
        pids.append(pid)
    return pids


def end(pids: Sequence[int], is_due: Callable[[], bool]) -> list[int]:
    """Kills the processes when that is due, or when one of them has failed. Returns their exit codes."""
    left, codes = list(pids), []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left:
        for pid in tuple(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        if any(codes) or time.monotonic() > deadline or is_due():
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return codes


class Killer(attack.Rounds[Counts]):
    def __init__(self, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Counts())
        images = np.random.default_rng(seed).integers(0, 256, (NUM_SAMPLES, *SHAPE), dtype=np.uint8)
        # A sample's label is its index.
        with ShardWriter(folder / "set", SHAPE, classes=[f"c{i}" for i in range(NUM_SAMPLES)]) as writer:
            for split, size in (("train", NUM_SAMPLES), ("val", 65)):
                for index in range(size):
                    writer.append(images[index], index, split=split)
        self._whole: dict[Kind, Whole] = {}
        self._numbers = count()

    def round(self) -> None:
        kind = Kind(self._random.randint(1, 2), self._random.randint(1, 3))
        whole = self._whole.get(kind) or self._undisturbed(kind)
        folder = self._new_folder()
        kills = 0
        while True:
            codes = end(start(folder, kind), self._moment(folder / "batches-0.jsonl", len(whole.batches[0])))
            self._check_batches(folder, kind, whole)
            if not any(codes):
                break
            if set(codes) - {0, -signal.SIGKILL}:
                self._violation(f"{kind}: ended with {codes}: {(folder / 'output').read_text(errors='replace')[-900:]}")
                break
            kills += 1
            checkpoints = list(folder.glob("checkpoints/checkpoint-*"))
            self.counts.unfinished += any(not (one / "whole").exists() for one in checkpoints)
        if not any(codes):
            weights = torch.load(folder / "weights.pt", weights_only=True)
            if not all(torch.equal(weights[name], values) for name, values in whole.weights.items()):
                self._violation(f"{kind}: other weights than those of an undisturbed run")
        self.counts.kills += kills
        self.counts.rounds += 1
        self.say(f"round {self.counts.rounds}, {kind}: {kills} kills")
        shutil.rmtree(folder)

    def _moment(self, log: Path, num_batches: int) -> Callable[[], bool]:
        """Returns a function that tells when some of the batches are noted, and a little time has passed. That may be
        after the end."""
        batches, delay = self._random.randint(1, num_batches), self._random.random() * MOST_DELAY_SECONDS

        def is_due() -> bool:
            if not log.exists() or log.read_bytes().count(b"\n") <= batches:  # the first line is the checkpoint
                return False
            time.sleep(delay)
            return True

        return is_due

    def _new_folder(self) -> Path:
        folder = self.folder / f"round-{next(self._numbers)}"
        folder.mkdir()
        (folder / "out").symlink_to(self.folder / "set")
        return folder

    def _undisturbed(self, kind: Kind) -> Whole:
        folder = self._new_folder()
        if any(end(start(folder, kind), lambda: False)):
            raise RuntimeError((folder / "output").read_text(errors="replace"))
        batches = [self._read(folder, rank)[1] for rank in range(kind.ranks)]
        self._whole[kind] = Whole(batches, torch.load(folder / "weights.pt", weights_only=True))
        return self._whole[kind]

    def _read(self, folder: Path, rank: int) -> tuple[str | None, list[Any]]:
        """Returns the checkpoint that the last start took, and its batches."""
        path = folder / f"batches-{rank}.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        path.unlink(missing_ok=True)
        first, *batches = map(json.loads, lines or [b"null"])
        return first, batches

    def _check_batches(self, folder: Path, kind: Kind, whole: Whole) -> None:
        for rank in range(kind.ranks):
            checkpoint, batches = self._read(folder, rank)
            step = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
            first = kind.batches_at(step)
            self.counts.resumed += rank == 0 and bool(batches) and first % (len(whole.batches[0]) // EPOCHS) > 0
            if batches != whole.batches[rank][first : first + len(batches)]:
                self._violation(f"{kind}: rank {rank} has trained on other batches after {checkpoint}")


def kill_trainer(rounds: int, seed: int = 0, folder: Path | None = None, say: Say = print) -> Counts:
    """Does so many rounds in `folder`, by default a temporary one."""
    # Imported once, and not by each of the processes that are forked.
    for module in ("torch._dynamo", "transformers.trainer", "transformers.models.resnet.modeling_resnet"):
        import_module(module)
    with tempfile.TemporaryDirectory(prefix="kill-trainer-", dir=folder) as made:
        killer = Killer(Path(made), seed, say)
        for _ in range(rounds):
            killer.round()
    return killer.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments, the ranks and the batches in a step")
    parser.add_argument("--rounds", type=int, default=20, help="trainings; default %(default)s")
    chosen = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks share this machine
    return verdict(kill_trainer(chosen.rounds, chosen.seed, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())
