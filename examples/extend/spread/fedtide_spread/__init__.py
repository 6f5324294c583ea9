"""How unlike the losses of a round's clients are: a part, a figure, a panel and a command.

Every command reads this file, so it imports nothing but ``Part``. The places that the part names
are imported once a run needs them.
"""

from fedmodels.config.part import Part

PART = Part(
    "spread",
    "",  # no key of a config switches it on: it is on wherever the package is installed
    home="fedtide_spread",
    server="server:LossSpread",
    panels="server:panels",
    computes=("loss_spread_last",),
)
