"""Weights of tokens added up by their distance from the best."""
