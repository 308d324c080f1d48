"""The CUDA path: paged attention and fused layers in Triton, and the layer loop as CUDA graphs.

The kernels are tested interpreted, on the CPU; what a GPU has shown is in `docs/cuda.md`.
"""
