"""Partitions on the disk, as client directories or as one store: written, read and checked."""
