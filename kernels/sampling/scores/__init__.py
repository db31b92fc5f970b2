"""Log-probabilities of tokens."""
