"""A small language model over characters, for the experiments beyond the paper; its blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class CharacterTransformer(nn.Module):
    """A decoder-only transformer: each position's logits for the next character.

    Pre-norm blocks, learned position embeddings, a GELU net of 4 width, no dropout, and an output
    layer of its own (not the transposed embedding). Queries, keys and values have a linear layer
    each: one layer of shape (3 width, width) would have one Kronecker factor for all three outputs,
    with 9 times the memory and 27 times the work of a factor of one of them. The linear layers have
    no biases: each would need a full factor for very few parameters.

    GPT-2's initialisation: weights and embeddings N(0, 0.02^2); layers that add to the residual
    stream have 1 / sqrt(2 layers) of that deviation.

    Args:
        characters: how many there are.
        width: of the residual stream.
        layers: blocks.
        heads: of the attention; must divide `width`.
        context: the longest sequence.

    Raises:
        ValueError: `heads` does not divide `width`.
    """

    def __init__(self, characters: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.character_embedding = nn.Embedding(characters, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        start_as_gpt2(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next character, one row a position.

        A mean over the rows is then the mean over positions, as cross entropy and the optimizers'
        categorical likelihood take it.

        Args:
            tokens: (N, T), int64, T at most `context`.

        Returns:
            (N T, characters), rows in the order of `tokens.flatten()`.
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        hidden = self.character_embedding(tokens) + self.position_embedding(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits.flatten(0, 1)


def start_as_gpt2(model: nn.Module, layers: int) -> None:
    """Draw the weights of all embeddings and linear layers of a model with this many blocks."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.output.weight", "contract.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))


class Block(nn.Module):
    """(N, T, width) to the same: attention and a net of one hidden layer, each with a residual.

    Args:
        width: of the residual stream.
        heads: of the attention; must divide `width`.
        causal: no position attends to later ones.

    Raises:
        ValueError: `heads` does not divide `width`.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide width, {width}, got {heads}")
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal)
        self.net_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The residual stream after the block."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        added: Tensor = self.contract(functional.gelu(self.expand(self.net_norm(hidden))))
        return hidden + added


class _Attention(nn.Module):
    """(N, T, width) to the same: causal positions attend to themselves and to earlier ones."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output
