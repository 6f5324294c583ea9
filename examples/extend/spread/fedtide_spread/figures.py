"""What the two figures mean, for reports and ``fedsrv metrics``."""

from fedmodels.numerics.metric_tables import number

FIGURES = (
    number("loss_spread", "spread of losses", "largest minus smallest loss of a round's clients"),
    number("loss_spread_last", "last spread of losses", "`loss_spread` of the last round"),
)
