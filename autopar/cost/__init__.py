"""Cost models: the time and memory that a plan takes on a device that need not be present."""
