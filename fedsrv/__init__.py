"""The coordinator: rounds, commits, the service and the launcher."""

import fedmodels  # noqa: F401  # says so on a system that is not supported, before anything else
