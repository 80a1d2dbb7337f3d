"""Kernels of the paper's models: plain references, and fast versions beside them."""
