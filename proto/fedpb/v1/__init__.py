"""Version 1 of the schema, and the stubs that ``make proto`` writes of it."""
