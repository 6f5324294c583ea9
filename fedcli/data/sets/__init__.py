"""The data sets that are known by name, and how each publisher's files are read."""
