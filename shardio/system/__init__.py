"""The machine beneath: files that are whole or absent, retries, threads, memory, cores, filesystems, and the kernels in
C.

Every other room calls this one, and it calls none.
"""
