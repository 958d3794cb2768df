"""Options, prices and output that several commands share."""
