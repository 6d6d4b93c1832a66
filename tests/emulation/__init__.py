"""Kernels without a GPU: the .cu files as C++ on fibers (`builder`), behind the device seam (`device`)."""
