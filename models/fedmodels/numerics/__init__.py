"""The numerical problems that methods share: transport plans, k-means, projections, scores, seeds.

May import ``tensors`` and ``errors``.
"""
