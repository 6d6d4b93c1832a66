"""The kernels in NumPy: the same names and argument order, float32 with the kernels' rounding points."""
