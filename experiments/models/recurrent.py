"""A small recurrent language model over characters, for the experiments beyond the paper."""

from __future__ import annotations

from torch import Tensor, nn


class CharacterGRU(nn.Module):
    """An embedding, one GRU layer and a linear layer, all as PyTorch starts them.

    Args:
        characters: how many there are.
        width: of the embedding and of the GRU's state.
    """

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.recurrence = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next character, one row a position.

        Args:
            tokens: (N, T), int64. The state before the first is 0.

        Returns:
            (N T, characters), rows in the order of `tokens.flatten()`.
        """
        states, _ = self.recurrence(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits.flatten(0, 1)
