"""TNT with Accelerate: trains a small network on scikit-learn's digits.

Needs ``pip install accelerate scikit-learn``; run ``python examples/accelerate_loop.py``.
"""

import itertools

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tnt_optim import TNT


def main(steps: int = 60) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns their losses and the optimizer."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))

    opt = TNT(model.parameters(), likelihood="categorical")
    # Before or after prepare(): the prepared model still calls this one.
    opt.attach(model)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(data, batch_size=100, shuffle=True, drop_last=True)
    prepared, wrapped, loader = accelerator.prepare(model, opt, loader)
    # The wrapped optimizer steps, saves and loads; for everything else, use TNT itself.
    opt.warm_start(prepared(x) for x, _ in loader)

    losses, micro = [], []
    for x, y in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(prepared):
            loss = nn.functional.cross_entropy(prepared(x), y)  # observed here
            accelerator.backward(loss)
            wrapped.step()
            wrapped.zero_grad()
        micro.append(loss.item())
        if accelerator.sync_gradients:  # the optimizer made a step
            losses.append(sum(micro) / len(micro))
            micro = []
        if len(losses) == steps:
            break
    return losses, opt


if __name__ == "__main__":
    losses, opt = main()
    for step in range(0, len(losses), 10):
        print(f"step {step:3}  loss {losses[step]:.4f}")
    print(f"last      loss {losses[-1]:.4f}  {opt.failures()}")
