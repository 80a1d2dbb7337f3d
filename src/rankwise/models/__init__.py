"""The language models of the paper, as ordinary modules: they know nothing of pruning."""
