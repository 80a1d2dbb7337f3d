"""Attention with scores by content and by distance, as in Transformer-XL: a plain reference and fast versions of it."""
