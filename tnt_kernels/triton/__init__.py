"""The operators on a GPU: Triton kernels, each of which serves a whole list of tensors."""
