"""Python imports this module at start, where its directory is on the path: see fault_hooks."""

import os

if os.environ.get("FEDTIDE_FAULTS"):
    import fault_hooks

    fault_hooks.install()
