"""Compact models in the formats of other engines. Every format has the same two functions:

export(model, example_inputs, path, int8=False) -> Exported     a new folder, kept only if outputs are equal
load(path) -> runner                                            runner(**inputs) gives outputs by name
"""
