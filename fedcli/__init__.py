"""The client: its data, its training, its private state and its link to the server."""
