"""The recipe of docs/guide/generative.md: an array that several ranks compute, one of which is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from documents import code_blocks
from pictures import random_picture
from places import ROOT
from starts import Starts

from shardio import ShardLoader, ShardWriter, change

COUNT = 260
# Ends rank 1 after so many calls of the encoder, once rank 0 has done its part, and notes the samples of each call.
KILLER = f"""
import os, time, numpy, torch
forward = torch.nn.Conv2d.forward
calls_left = [int(os.environ["STOP_AFTER"])]

def counted(module, images):
    if os.environ["RANK"] == "1":
        calls_left[0] -= 1
        while calls_left[0] == 0:
            if numpy.load("done.npy").sum() == {COUNT // 2 + 64}:
                os._exit(9)
            time.sleep(0.01)
    with open("encoded", "a") as file:
        file.write("x" * len(images))
    return forward(module, images)

torch.nn.Conv2d.forward = counted
"""


def test_latents_of_two_ranks_are_complete_after_a_kill_and_another_run(starts: Starts, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images = np.stack([random_picture(rng, 40, 36) for _ in range(COUNT)])
    with ShardWriter(tmp_path / "out", (40, 36, 3), classes=["a"]) as writer:
        for image in images:
            writer.append(image, 0)
    make, encode, *_ = code_blocks((ROOT / "docs/guide/generative.md").read_text(encoding="utf-8"), "python")
    (tmp_path / "make.py").write_text(make, encoding="utf-8")
    (tmp_path / "encode.py").write_text(KILLER + encode, encoding="utf-8")
    assert starts.run(tmp_path / "make.py", folder=tmp_path) == [0], starts.said()
    assert starts.run(tmp_path / "encode.py", folder=tmp_path, ranks=2, STOP_AFTER="2")[1] == 9, starts.said()
    assert np.load(tmp_path / "done.npy").sum() == COUNT // 2 + 64
    assert starts.run(tmp_path / "encode.py", folder=tmp_path, ranks=2) == [0, 0], starts.said()
    assert (tmp_path / "encoded").read_text() == "x" * COUNT
    change(tmp_path / "out", tmp_path / "latents", arrays={"latent": tmp_path / "latent.npy"}, split="train")
    cropped = images[:, 4:36, 2:34].reshape(COUNT, 4, 8, 4, 8, 3) / 127.5 - 1
    expected = np.repeat(cropped.mean(axis=(2, 4, 5))[:, None], 4, axis=1)
    with ShardLoader(tmp_path / "latents", COUNT, shuffle=False, arrays=["latent"], images=None) as loader:
        ((_, arrays),) = loader
    np.testing.assert_allclose(arrays["latent"].cpu().numpy(), expected, atol=2e-3)
