"""What a method is, and the stock loop that trains and scores one client's net.

May import ``nets``, ``config``, ``numerics``, ``tensors`` and ``errors``.
"""
