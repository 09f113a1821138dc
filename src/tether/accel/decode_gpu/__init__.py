"""The native engine on a GPU: fixed slots, fused kernels, and decode steps replayed as CUDA graphs."""
