"""KFAC: layers, their activations and gradients, statistics and inverses."""

from tnt_optim.kfac.kfac import KFAC

__all__ = ["KFAC"]
