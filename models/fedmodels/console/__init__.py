"""What commands share: options, help, completion, lines of the log, charts in text."""
