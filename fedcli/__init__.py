"""The client: its data, its training, its private state and its link to the server."""

import fedmodels  # noqa: F401  # says so on a system that is not supported, before anything else
