"""Kernels that know JAX and nothing of this project."""
