"""How a data set is dealt out to clients and tasks: pure numpy, from the run's seed."""
