"""Engines: one seam (`api`), a fake, the NumPy reference, and two engines: `cpu` and `cuda`."""
