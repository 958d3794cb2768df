"""Generation of tokens from the parameters of a session."""
