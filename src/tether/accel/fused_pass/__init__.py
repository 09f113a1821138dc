"""The training pass over packed tokens: plain torch in float32, Triton kernels in half precision on CUDA."""
