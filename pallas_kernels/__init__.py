"""Pallas TPU kernels and their plain-JAX twins of the same signature. Imports nothing from `angelspec_jax`."""
