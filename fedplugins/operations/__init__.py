"""For whoever keeps a coordinator: backups, what the machine has, how long a run takes."""
