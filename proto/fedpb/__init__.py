"""The wire: the schema, its generated stubs, and the codec between bundles and frames."""

PROTOCOL = 2
"""What both sides must speak; changes whenever one would misunderstand the other."""
