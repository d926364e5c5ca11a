"""The language problems: a character-level transformer or GRU on a text file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import data_folder
from experiments.data.text import Text, python_sources, read_text, split
from experiments.models.recurrent import CharacterGRU
from experiments.models.transformer import CharacterTransformer
from experiments.problems.problem import Endless

CONTEXT = 64
# Steps between two measurements of the validation loss.
EPOCH_STEPS = 50
# Windows of the validation loss: as much work as 8 batches forward, per 50 training steps. All runs
# use the same windows, so most of their noise cancels in differences.
VALIDATION_WINDOWS = 256


class Language(Endless):
    """The next character of a text, at every position of windows at random places.

    An "epoch" is a fixed number of steps, because a text has as many windows as characters. Each
    step draws its batch with replacement.

    Args:
        text: for training and validation.
        width: of the model.
        layers: blocks of the model.
        heads: of the model's attention.
        context: characters in a window.
        epoch_steps: steps in an epoch.
        validation_windows: windows of the validation loss, at most: evenly spread, without
            overlap.
        source: the text's name.

    Raises:
        ValueError: the training or the validation text has no window of this length.
    """

    name = "language"
    sizes: tuple[str, ...] = ("width", "layers", "heads")  # of the model, by the arguments' names
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
        if min(len(text.train), len(text.validation)) <= context:
            raise ValueError(
                f"context must be below the number of characters to train and to validate on, "
                f"{len(text.train)} and {len(text.validation)}, got {context}"
            )
        self.text, self.source = text, source
        self.width, self.layers, self.heads, self.context = width, layers, heads, context
        self.epoch_steps = epoch_steps
        self.label = f"Character transformer, width {width}, {layers} layers"
        # A window is `context` characters and the next one.
        self.examples = len(text.train) - context
        self.validation_starts = _spread(
            len(text.validation) - context, context, validation_windows
        )

    def build(self) -> nn.Module:
        """The transformer."""
        return CharacterTransformer(
            len(self.text.characters), self.width, self.layers, self.heads, self.context
        )

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """The windows that start at `indices`, (N, context), and the character after each place."""
        return self._windows(self.text.train, indices)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, averaged over all positions of all windows."""
        return functional.cross_entropy(outputs, targets)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The validation loss, over the same windows each time."""
        losses = []
        for starts in self.validation_starts.split(64):
            inputs, targets = self._windows(self.text.validation, starts)
            losses.append(functional.cross_entropy(model(inputs), targets, reduction="sum"))
        total = torch.stack(losses).double().sum().item()
        return {"validation_loss": total / (len(self.validation_starts) * self.context)}

    def description(self) -> dict[str, Any]:
        """Text, model, and the windows of the validation loss."""
        names = ("source", *self.sizes, "context", "epoch_steps")
        return {
            "problem": self.name,
            "characters_to_train_on": len(self.text.train),
            "characters_to_validate_on": len(self.text.validation),
            "alphabet": len(self.text.characters),
            **{name: getattr(self, name) for name in names},
            "validation_windows": len(self.validation_starts),
        }

    def _windows(self, codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + torch.arange(self.context + 1, device=starts.device)
        windows = codes[places]
        return windows[:, :-1], windows[:, 1:].flatten()


class Recurrent(Language):
    """The same with a GRU of one layer.

    Args:
        text: for training and validation.
        width: of the embedding and of the GRU's state.
        windows: the arguments of `Language` that are not the model's.
    """

    name = "gru"
    sizes = ("width",)

    def __init__(self, text: Text, width: int = 128, **windows: Any) -> None:
        super().__init__(text, width, layers=1, heads=1, **windows)
        self.label = f"Character GRU, width {width}"

    def build(self) -> nn.Module:
        """The GRU with its embedding and its linear layer."""
        return CharacterGRU(len(self.text.characters), self.width)


def load_language(
    data: Path | None = None,
    kind: type[Language] = Language,
    corpus: Literal["shakespeare", "python"] = "shakespeare",
    **sizes: int,
) -> Language:
    """The problem of a text.

    Args:
        data: for "shakespeare": a text file; or a folder with tinyshakespeare/input.txt or
            input.txt in it; None for the folder that TNT_DATA names. The last tenth of the text is
            for validation.
        kind: `Language`, the transformer's, or `Recurrent`.
        corpus: "python" for the sources of Python's standard library, ten times as long.
        sizes: of the model, the windows and the epochs: arguments of `kind`.

    Raises:
        ValueError, OSError: the text cannot be read, or is too short.
    """
    if corpus == "python":
        whole, source = python_sources()
        return kind(split(whole, source), **sizes, source=source)
    path = data if data and data.is_file() else data_folder("tinyshakespeare", data) / "input.txt"
    text = read_text(path)
    if len(text.characters) < 2:
        raise ValueError(f"{path}: must have at least two different characters")
    return kind(text, **sizes, source=path.name)


def _spread(count: int, length: int, wanted: int) -> Tensor:
    """At most `wanted` starts in [0, count), evenly spread, at least `length` apart."""
    windows = min(wanted, 1 + (count - 1) // length)
    return torch.arange(windows) * (count - 1) // max(1, windows - 1)
