"""Triton kernels by subject; each kernel is defined once."""
