"""Fine-tuning: a transformer trained on Python's sources goes on with Shakespeare."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import data_folder
from experiments.data.text import Text, python_sources, split
from experiments.methods import lr_multiplier
from experiments.models import seeded
from experiments.problems.language import Language

# The first training: its steps, and AdamW's best rate in the searches at this width.
FIRST_STEPS, FIRST_RATE = 1000, 3.2e-3
# The low-rank updates: their rank, and the factor of their output.
RANK, SCALE = 8, 2.0


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (LoRA, Hu et al. 2021).

    The second matrix is zero at the start, so the layer's function is, and so is the gradient of
    the first one.

    Args:
        linear: the layer; it is frozen.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        outputs: Tensor = self.linear(inputs) + SCALE * self.up(self.down(inputs))
        return outputs


class FineTuning(Language):
    """The next character of a text, from the weights that another text left.

    Args:
        text: for training and validation.
        first: the other text, in the same alphabet.
        low_rank: train `LowRank` updates of the blocks' linear layers, instead of all weights.
        sizes: the arguments of `Language`.
    """

    name = "finetuning"

    def __init__(self, text: Text, first: Text, low_rank: bool, **sizes: Any) -> None:
        super().__init__(text, **sizes)
        self.low_rank = low_rank
        self.start = _trained(Language(first, **sizes))
        self.label += ", low-rank updates" if low_rank else ", all weights"

    def build(self) -> nn.Module:
        """The transformer that the other text has trained."""
        model = super().build()
        model.load_state_dict(self.start)
        if self.low_rank:
            model.requires_grad_(False)
            blocks = model.get_submodule("blocks")
            for name, layer in list(blocks.named_modules()):
                if isinstance(layer, nn.Linear):
                    blocks.set_submodule(name, LowRank(layer))
        return model

    def description(self) -> dict[str, Any]:
        """Texts, model, and the first training."""
        first = {"steps": FIRST_STEPS, "lr": FIRST_RATE, "loss": round(self.start_loss(), 4)}
        updates = {"rank": RANK, "scale": SCALE} if self.low_rank else None
        return {**super().description(), "first": first, "low_rank": updates}

    @functools.cache  # noqa: B019
    def start_loss(self) -> float:
        """The validation loss on the new text before the first step."""
        return self.evaluate(self.build())["validation_loss"]


def _trained(problem: Language, batch_size: int = 32) -> dict[str, Tensor]:
    """The weights after a training with AdamW."""
    model, draw = seeded(problem.build, 0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), FIRST_RATE, weight_decay=0.0, fused=True)
    for step in range(FIRST_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = FIRST_RATE * lr_multiplier("warmup-cosine", step, 1, FIRST_STEPS)
        indices = torch.randint(problem.examples, (batch_size,), generator=draw)
        inputs, targets = problem.batch(indices, draw)
        optimizer.zero_grad()
        problem.loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


@functools.cache  # the first training takes a minute or two
def load_finetuning(data: Path | None = None, *, low_rank: bool, **sizes: Any) -> FineTuning:
    """The problem: from the sources of the running Python to Shakespeare.

    Args:
        data: the folder of the data; None for the one that TNT_DATA names.
        low_rank: see `FineTuning`.
        sizes: arguments of `Language`.

    Raises:
        ValueError, OSError: the text cannot be read.
    """
    path = data_folder("tinyshakespeare", data) / "input.txt"
    (first, source), second = python_sources(), path.read_text("utf-8")
    both = split(first + second, f"{source} and {path.name}")
    codes = torch.cat([both.train, both.validation])

    def text(own: Tensor) -> Text:
        trained = int(0.9 * len(own))
        return Text(own[:trained], own[trained:], both.characters)

    old, new = text(codes[: len(first)]), text(codes[len(first) :])
    return FineTuning(new, old, low_rank, source=f"{source}, then {path.name}", **sizes)
