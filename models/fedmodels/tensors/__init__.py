"""Bundles of tensors: what travels, rests on a disk and is averaged, and how it lies in memory.

May import ``errors``, ``machine``, ``printable`` and ``files``.
"""
