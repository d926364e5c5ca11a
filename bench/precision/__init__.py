"""Half precision, saved states and the contract of PyTorch's optimizers, in figures."""
