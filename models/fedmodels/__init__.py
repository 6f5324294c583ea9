"""What is learned and how: methods, networks, metrics and the numbers behind them.

Nothing here opens a socket, reads a clock or, but for :mod:`fedmodels.tensors.archive`, touches
a file.
"""
