"""Vision towers: one file per family, shared parts beside them."""
