"""What the compilers make of the GPU kernels, on a machine without a GPU."""
