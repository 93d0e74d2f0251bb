"""Whether torch sees the GPUs that the machine has."""

from __future__ import annotations

import os
import subprocess


def why_gpus_are_not_tested() -> str | None:
    """Returns why tests marked `gpu` would be skipped though there is a GPU; None where all is well.

    CUDA_VISIBLE_DEVICES= hides all GPUs, and is a wish that is respected.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    import torch  # takes its time

    if not listed.strip() or torch.cuda.is_available():
        return None
    return (
        f"nvidia-smi lists {listed.splitlines()[0]}, and torch {torch.__version__} sees no CUDA device: tests marked "
        "gpu would be skipped. Install a torch with CUDA (`make clean test CONSTRAINTS=constraints-cuda.txt`), or set "
        "CUDA_VISIBLE_DEVICES= to test without the GPU"
    )
