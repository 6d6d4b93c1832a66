"""Engines: one seam (`api`), a fake, the NumPy reference, and the CPU engine."""
