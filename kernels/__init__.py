"""Kernels written by hand, in Triton, with their gradients: RMSNorm and SwiGLU.  docs/kernels.md \
explains them."""
