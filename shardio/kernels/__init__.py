"""The kernels in C: `rowcopy`, `rowread`, `resample` and `pixels`; and `finalized`, which has to be in C.

Each is called only by the Python module of its name."""
