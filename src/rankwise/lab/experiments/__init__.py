"""Experiments: presets that return a config, and the pipeline that runs them from the dense base to the table."""
