"""GLUE: a pretrained encoder is fine-tuned, pruned while it learns from its dense self, and healed."""
