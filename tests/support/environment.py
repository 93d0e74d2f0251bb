"""What the processes of the suite have in common. It is imported first: NumPy and torch look once."""

from __future__ import annotations

import os
import sys

# Tests run beside each other on all cores. A second thread of NumPy or torch takes the core of another test, and waits
# for the first one without sleeping. Tests that are about threads set their number.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

# Tests start hundreds of interpreters. Without compiled modules in __pycache__ each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
