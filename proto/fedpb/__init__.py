"""The wire: the schema, its generated stubs, and the codec between bundles and frames."""

PROTOCOL = 4
"""What both sides must speak; changes whenever one would misunderstand the other."""
AGAIN_AFTER = "fedtide-again-after-ms"
"""Trailing metadata of a refusal that is no final one: when to make the same call again."""
