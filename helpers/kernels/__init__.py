"""CUDA kernels that lessons write by hand."""
