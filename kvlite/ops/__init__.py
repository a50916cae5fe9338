"""Tensors in, tensors out: attention, and kernels in Triton and numba."""
