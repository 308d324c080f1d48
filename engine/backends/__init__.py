"""How a device computes layers: the model's own modules, fused Llama layers, native CPU kernels, CUDA."""
