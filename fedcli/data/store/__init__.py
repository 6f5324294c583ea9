"""Client directories: written by ``fedcli partition``, read by clients.

May import ``sets`` and ``cuts``.
"""
