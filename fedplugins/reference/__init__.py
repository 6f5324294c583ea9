"""``fedsrv methods``, ``nets``, ``metrics`` and ``schema``: what there is, with keys and types."""
