"""Who speaks to whom: certificates that name clients, and TLS."""
