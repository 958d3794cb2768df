"""What several commands share: their options, prices and output."""
