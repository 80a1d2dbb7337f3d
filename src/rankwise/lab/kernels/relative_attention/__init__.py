"""Attention with scores by content and by distance, as in Transformer-XL: the plain truth, and its fast twins."""
