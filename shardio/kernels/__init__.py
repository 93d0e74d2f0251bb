"""The kernels in C, each with one Python module, the only one that calls it: `rowcopy`, `rowread`, `resample`, `pixels`
and `fit`. `built` says which of them this installation has, and how threads share the work on a batch."""
