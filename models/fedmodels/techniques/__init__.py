"""Techniques that several methods use: prototypes, generators, replay, second nets, mixtures.

May import everything of fedmodels but ``methods``; replay methods build on ``methods.fedavg``.
"""
