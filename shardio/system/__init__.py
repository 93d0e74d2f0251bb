"""The machine beneath: whole files, retries, threads, memory, cores, filesystems, progress bars.

Every other subpackage may use this one; it uses no other.
"""
