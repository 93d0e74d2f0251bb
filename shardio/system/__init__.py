"""The machine beneath: files that are whole or absent, retries, threads, memory, cores, filesystems, and the kernels in
C.

Every other subpackage may use this one; it uses no other.
"""
