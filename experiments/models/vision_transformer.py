"""A small vision transformer, for the experiments beyond the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.models.transformer import Block, start_as_gpt2

PATCH = 4  # pixels, each way
PATCHES = 64  # of an image of 32x32 pixels
WIDTH, LAYERS, HEADS = 64, 2, 4


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021, small: images (N, 3, 32, 32) to logits (N, classes).

    The blocks and the start are those of `CharacterTransformer`, but every patch attends to every
    patch, and the head sees the patches' mean. The convolution that embeds the patches starts as
    PyTorch has it. It and the head have no biases, as the blocks.

    Args:
        classes: number of logits.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.position_embedding = nn.Embedding(PATCHES, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH, HEADS, causal=False) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=False)
        start_as_gpt2(self, LAYERS)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images of 32x32 pixels, one row an image."""
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        positions = torch.arange(PATCHES, device=images.device)
        hidden = self.blocks(patches + self.position_embedding(positions))
        logits: Tensor = self.head(self.norm(hidden).mean(dim=1))
        return logits
