"""The kernels in C: `rowcopy`, `rowread`, `resample` and `pixels`.

Each kernel is called only by the Python module of its name. `built` knows which kernels this installation has."""
