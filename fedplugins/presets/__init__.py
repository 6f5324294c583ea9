"""``fedsrv init``: configs to begin with."""
