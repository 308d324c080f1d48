"""The CUDA path: paged attention in Triton, and the layer loop as CUDA graphs.

The kernels are tested interpreted, on the CPU; what only a GPU can show is in `docs/cuda.md`.
"""
