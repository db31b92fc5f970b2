"""Ahead-of-time compilation of every Triton kernel, for each card, on a machine without one."""
