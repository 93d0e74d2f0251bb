"""What the processes of the suite have in common: environment variables, and the GPU. Imported first: NumPy and torch
read the variables once."""

from __future__ import annotations

import os
import subprocess
import sys

# Tests run beside each other on all cores. A second thread of NumPy or torch takes the core of another test, and waits
# for the first one without sleeping. Tests that are about threads set their number.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

# Tests start hundreds of interpreters. Without compiled modules in __pycache__ each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def why_gpus_are_not_tested() -> str | None:
    """Returns why tests marked `gpu` would not run on a GPU though there is one; None where all is well.

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
        "gpu would run on the stand-in. Install a torch with CUDA (`make clean test CONSTRAINTS=FILE`, with a "
        "constraints file of your own), or set CUDA_VISIBLE_DEVICES= to test without the GPU"
    )
