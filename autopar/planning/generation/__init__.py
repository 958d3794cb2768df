"""Plans of models that generate."""
