"""The wire: the schema, its generated stubs, and the codec between bundles and frames."""
