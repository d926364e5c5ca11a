"""Embeddings: the middle token from the mean of its neighbours' embeddings (CBOW)."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.text import python_sources
from experiments.problems.problem import Endless

EPOCH_STEPS = 100
# Tokens on each side.
WINDOW = 4
VALIDATION_WORDS = 20_000
# Words, numbers and single signs.
TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|[^\w\s]")


class BagOfWords(nn.Module):
    """The mean of the neighbours' embeddings, and a linear layer to the vocabulary.

    Args:
        vocabulary: number of tokens.
        width: of an embedding.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, neighbours: Tensor) -> Tensor:
        """Logits (N, vocabulary) of tokens with neighbours (N, 2 window), int64."""
        logits: Tensor = self.head(self.embedding(neighbours).mean(dim=1))
        return logits


class Words(Endless):
    """The tokens of Python's standard library; nearly all parameters are embeddings.

    Each step draws its places with replacement; an "epoch" is a fixed number of steps.

    Args:
        text: the whole text. Its last tenth is for validation.
        source: its name.
        vocabulary: the most frequent tokens; all others are one more, the last.
        width: of an embedding.
        epoch_steps: steps in an epoch.
    """

    name = "words"
    likelihood = "categorical"
    loss_label = "nats per token"

    def __init__(
        self,
        text: str,
        source: str,
        vocabulary: int = 5000,
        width: int = 64,
        epoch_steps: int = EPOCH_STEPS,
    ) -> None:
        tokens = TOKEN.findall(text)
        kept = [token for token, _ in Counter(tokens).most_common(vocabulary - 1)]
        codes = {token: code for code, token in enumerate(kept)}
        self.source, self.vocabulary, self.width = source, len(kept) + 1, width
        self.codes = torch.tensor([codes.get(token, len(kept)) for token in tokens])
        self.epoch_steps = epoch_steps
        self.label = f"Bag of words, {self.vocabulary} tokens, width {width}"
        # The first and the last tokens lack neighbours.
        places = len(tokens) - 2 * WINDOW
        self.examples = int(0.9 * places)
        chosen = np.linspace(self.examples + 2 * WINDOW, places - 1, VALIDATION_WORDS)
        self.validation = torch.from_numpy(np.unique(chosen.astype(np.int64)))

    def build(self) -> nn.Module:
        """Embeddings from N(0, 1), as PyTorch draws them."""
        return BagOfWords(self.vocabulary, self.width)

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """The neighbours (N, 2 window) of the tokens at `indices`, and the tokens (N,)."""
        offsets = torch.arange(2 * WINDOW + 1, device=indices.device)
        windows = self.codes[indices[:, None] + offsets]
        return windows[:, offsets != WINDOW], windows[:, WINDOW]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(outputs, targets)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The validation loss, over the same places each time."""
        losses = []
        for indices in self.validation.split(1000):
            inputs, targets = self.batch(indices, torch.Generator())
            losses.append(functional.cross_entropy(model(inputs), targets, reduction="sum"))
        return {"validation_loss": torch.stack(losses).sum().item() / len(self.validation)}

    def description(self) -> dict[str, Any]:
        """Text, vocabulary and model."""
        return {
            "problem": self.name,
            "source": self.source,
            "tokens_to_train_on": self.examples,
            "vocabulary": self.vocabulary,
            "width": self.width,
            "window": WINDOW,
            "epoch_steps": self.epoch_steps,
            "validation_words": len(self.validation),
        }


def load_words() -> Words:
    """The problem on the sources of the running Python."""
    return Words(*python_sources())
