"""What a plan costs: seconds of operators and collectives on a device that need not be here."""
