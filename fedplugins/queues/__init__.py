"""Queues of runs: a front that stays and listens, and a process for each run that is served."""
