"""The page of this repository's results, made from the records in `results/`."""
