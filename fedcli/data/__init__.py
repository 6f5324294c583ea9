"""Data sets, partitions and the stream of tasks of one client."""
