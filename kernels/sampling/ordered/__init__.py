"""Collected tokens in the order of tokens, where they are few."""
