"""Copies of sets on a node's own disk, and splits that are read through them.

A copy is a folder named by the set's digest. A lease, a shared lock on DIGEST.lock, keeps it from being evicted. The
right to fill, an exclusive lock on DIGEST.fill, is taken under a lease. All locks end with their process. If
DIGEST.lock is newer than the copy, it may not show all leases: eviction then waits until it is two minutes old.

    a copy is    shown by                      moved on by
    absent       no folder                     CopyFiller, with the right to fill: partial
    partial      a folder without a manifest   CopyFiller, when every file is whole, by the manifest: complete
    complete     the manifest                  Cache.evict, with DIGEST.lock alone, by a rename: evicted
    evicted      a hidden folder *.evicted     any Cache.sweep, with a lock on the folder: removed

    a file is    shown by                      moved on by
    missing      neither of its two names      CopyFiller: unfinished, or received, as a link to another copy's file
    unfinished   its hidden name, and a block  CopyFiller, or a PartialSet of the same user with a shared lock on the
                 that is MISSING or COMING     file, block by block: received
    received     every block is THERE          PartialCopy.finish, with an exclusive lock on the file: whole if the
                 (it is not verified yet)      sha256 is right; missing if it cannot be synced; otherwise every block
                                               is MISSING again
    whole        its own name and size         CopyFiller, which finds it damaged: missing, in all copies that share it
"""
