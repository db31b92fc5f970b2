"""Finding tokens by the running sum of their weights, without a sort."""
