"""The kernel of one token of each sequence."""
