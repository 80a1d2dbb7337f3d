"""The lab: data, models, the training loop and the experiments that reproduce the paper, built on the library."""
