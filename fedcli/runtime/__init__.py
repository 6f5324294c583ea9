"""One client process: the link to the server, the worker that trains, private states."""
