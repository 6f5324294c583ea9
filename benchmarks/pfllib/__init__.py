"""Fashion-MNIST as PFLlib's leaderboard has it: its code beside ours on equal rows and weights."""
