"""The coordinator: rounds, commits, the service and the launcher."""
