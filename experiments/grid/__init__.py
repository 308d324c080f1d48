"""Experiments: a grid of pools, methods, datasets, loads and seeds, in cells kept by what they depend on."""
