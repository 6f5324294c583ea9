"""What a run keeps on disk: commits, states and the way back after a crash."""
