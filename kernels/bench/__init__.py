"""Measured speed of the kernels, against ceilings and peers measured in the same run."""
