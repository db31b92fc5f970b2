"""humming-kernels behind quant_linear and moe: prebuilt kernels, our own weights' order and table.

The package of that name is imported by the build alone; a server loads only its launcher library.
"""
