"""KFAC: layers, their activations, statistics and inverse factors."""

from tnt_optim.kfac.kfac import KFAC

__all__ = ["KFAC"]
