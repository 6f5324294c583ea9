"""A sweep: methods × seeds × settings as runs of their own, and the tables that compare them.

May import ``presets``, ``ray_cluster`` and ``report``.
"""
