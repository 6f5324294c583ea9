"""Where else the numbers of a run go while it goes on; each in a thread of its own.

The packages behind it are extras.
"""
