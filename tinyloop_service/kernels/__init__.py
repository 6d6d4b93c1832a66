"""CUDA kernels as functions: build, launch, and a wrapper for each file of kernels_cu/."""
