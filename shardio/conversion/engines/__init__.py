"""Where the tasks of a conversion run: threads, processes, Dask."""
