"""What several methods are built of: prototypes, generators, replay, second nets, learned mixtures.

May import everything of fedmodels but ``methods``; replay methods build on ``methods.fedavg``.
"""
