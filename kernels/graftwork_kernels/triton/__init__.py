"""The operators as Triton kernels, for GPUs; the interpreter runs them anywhere."""
