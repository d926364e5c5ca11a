"""The language problem: a character-level transformer on a text file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import Text, read_text
from experiments.models import CharacterTransformer
from experiments.problems.problem import Problem

# What the transformer's command and table have in common.
CONTEXT = 64
BATCH_SIZE = 32
# Between two measurements of the validation loss.
EPOCH_STEPS = 50
# Of 64 characters each: forwards of 8 batches' windows, against 50 steps' forwards and backwards.
# All runs are measured on the same windows, so that most of their noise cancels in differences.
VALIDATION_WINDOWS = 256
# A text has as many windows as characters: a warm start takes a sample of them.
WARM_START_BATCHES = 20


class Language(Problem):
    """The next character of a text, at every position of windows at random places.

    An "epoch" is a fixed number of steps: a text has as many windows as characters, and runs are
    shorter than a pass over all of them. A step's batch is drawn anew, with replacement.

    Args:
        text: what to train and to validate on.
        width: of the model.
        layers: blocks of the model.
        heads: of the model's attention.
        context: characters in a window.
        epoch_steps: steps in an epoch.
        validation_windows: how many windows the validation loss is a mean over, at most: evenly
            spread, none overlapping another.
        source: the text's name.

    Raises:
        ValueError: the text has no window of this length on one of its sides; or a number is not
            positive.
    """

    name = "language"
    likelihood = "categorical"
    loss_label = "nats per character"

    def __init__(
        self,
        text: Text,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        context: int = CONTEXT,
        epoch_steps: int = EPOCH_STEPS,
        validation_windows: int = VALIDATION_WINDOWS,
        source: str = "",
    ) -> None:
        for name, number in (
            ("context", context),
            ("epoch_steps", epoch_steps),
            ("validation_windows", validation_windows),
        ):
            if number < 1:
                raise ValueError(f"{name} must be positive, got {number}")
        shorter = min(len(text.train), len(text.validation))
        if shorter <= context:
            raise ValueError(
                f"context must be below the number of characters to train and to validate on, "
                f"{len(text.train)} and {len(text.validation)}, got {context}"
            )
        self.text, self.source = text, source
        self.width, self.layers, self.heads, self.context = width, layers, heads, context
        self.epoch_steps = epoch_steps
        self.label = f"Character transformer, width {width}, {layers} layers"
        # A window is `context` characters and the one after them.
        self.examples = len(text.train) - context
        self.validation_starts = _spread(
            len(text.validation) - context, context, validation_windows
        )

    def build(self) -> nn.Module:
        """The transformer."""
        return CharacterTransformer(
            len(self.text.characters), self.width, self.layers, self.heads, self.context
        )

    def to(self, device: torch.device) -> Language:
        """The problem with its text on a device."""
        moved = copy.copy(self)
        moved.text = Text(
            self.text.train.to(device), self.text.validation.to(device), self.text.characters
        )
        moved.validation_starts = self.validation_starts.to(device)
        return moved

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """The windows that start at `indices`, (N, context), and what follows each character."""
        return self._windows(self.text.train, indices)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, averaged over all positions of all windows."""
        return functional.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The validation loss, over the same windows each time."""
        training = model.training
        model.eval()
        losses = []
        with torch.no_grad():
            for starts in self.validation_starts.split(64):
                inputs, targets = self._windows(self.text.validation, starts)
                losses.append(functional.cross_entropy(model(inputs), targets, reduction="sum"))
        model.train(training)
        total = torch.stack(losses).double().sum().item()
        return {"validation_loss": total / (len(self.validation_starts) * self.context)}

    def steps_per_epoch(self, batch_size: int) -> int:
        """The same for every batch size."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        return self.epoch_steps

    def order(self, batch_size: int, shuffle: torch.Generator) -> Tensor:
        """Random windows, each as likely as any other at every place."""
        return torch.randint(self.examples, (self.epoch_steps, batch_size), generator=shuffle)

    def warm_start_order(self, batch_size: int) -> Tensor:
        """20 batches of random windows, the same for every seed."""
        fixed = torch.Generator().manual_seed(0)
        return torch.randint(self.examples, (WARM_START_BATCHES, batch_size), generator=fixed)

    def description(self) -> dict[str, Any]:
        """Text, model, and what a validation loss is measured on."""
        return {
            "problem": self.name,
            "source": self.source,
            "characters_to_train_on": len(self.text.train),
            "characters_to_validate_on": len(self.text.validation),
            "alphabet": len(self.text.characters),
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "context": self.context,
            "epoch_steps": self.epoch_steps,
            "validation_windows": len(self.validation_starts),
        }

    def _windows(self, codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + torch.arange(self.context + 1, device=starts.device)
        windows = codes[places]
        return windows[:, :-1], windows[:, 1:].flatten()


def load_language(path: str | Path, **sizes: int) -> Language:
    """The problem of the text in a file.

    Args:
        path: the file; its last tenth is for validation.
        sizes: of the model, the windows and the epochs: arguments of `Language`.

    Raises:
        ValueError, OSError: the text cannot be read, or is too short.
    """
    path = Path(path)
    text = read_text(path)
    if len(text.characters) < 2:
        raise ValueError(f"{path}: must have two different characters or more, got one")
    try:
        return Language(text, **sizes, source=path.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _spread(count: int, length: int, wanted: int) -> Tensor:
    """At most `wanted` starts in [0, count), evenly spread, at least `length` apart."""
    fitting = 1 + (count - 1) // length
    windows = min(wanted, fitting)
    if windows == 1:
        return torch.zeros(1, dtype=torch.int64)
    return torch.arange(windows) * (count - 1) // (windows - 1)
