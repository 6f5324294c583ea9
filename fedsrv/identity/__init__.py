"""Who speaks to whom: certificates that name clients, and TLS.

May import nothing of this package.
"""
