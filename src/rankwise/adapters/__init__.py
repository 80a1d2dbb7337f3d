"""Adapters: from a model family to a plan."""
