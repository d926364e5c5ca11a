"""TNT with Lightning: trains a small network on scikit-learn's digits.

Needs ``pip install lightning scikit-learn``; run ``python examples/lightning_module.py``.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tnt_optim import TNT


class Classifier(lightning.LightningModule):
    """A network whose outputs TNT observes; optimization is automatic."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of one batch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)  # observed here
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> TNT:
        """Attaches TNT to the module that returns the logits, because training_step does not."""
        opt = TNT(self.parameters(), likelihood="categorical")
        opt.attach(self.net)
        return opt


def main(steps: int = 60) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns their losses and the optimizer."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    loader = DataLoader(data, batch_size=200, shuffle=True, drop_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=steps, enable_checkpointing=False, **quiet)
    model = Classifier()
    trainer.fit(model, loader)
    (opt,) = trainer.optimizers
    return model.losses, opt


if __name__ == "__main__":
    losses, opt = main()
    for step in range(0, len(losses), 10):
        print(f"step {step:3}  loss {losses[step]:.4f}")
    print(f"last      loss {losses[-1]:.4f}  {opt.failures()}")
