"""CUDA's part of the program, checked without a GPU."""
