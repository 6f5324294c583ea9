"""Methods that the papers compare theirs with, beside those that the core is built on."""
