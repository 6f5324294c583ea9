"""What halves of a run agree on beside the config: places in it, clients, classes, data."""
