"""Robust rules: what the uploads of an interaction become where some of the clients may lie.

``rule`` is what a run takes, by ``[server] reduce``; ``rows`` reads uploads a block of columns at a
time; ``coefficients`` has the rules that are sums of uploads, ``coordinates`` those that look at
each coordinate by itself.
"""
