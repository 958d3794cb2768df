"""Process groups and collectives of generated programs, and their measurement."""
