"""What the user fixes before planning: layouts, named dimensions and plans of the literature."""
