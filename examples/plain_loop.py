"""TNT in a loop of your own, with a scheduler, a checkpoint and TensorBoard.

Needs nothing but this package; run ``python examples/plain_loop.py``. With the package tensorboard
``python examples/plain_loop.py runs`` writes losses and diagnostics to the folder ``runs``.
"""

import io
import sys

import torch
from torch import nn

from tnt_optim import TNT


def main(steps: int = 60, log: str | None = None) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns their losses and the optimizer."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 20)
    targets = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5))(2 * inputs).argmax(1)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5))

    opt = TNT(model.parameters(), likelihood="categorical")
    state_bytes = opt.memory_estimate()["total"]  # before training: plan the memory with it
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    writer, losses = None, []
    if log is not None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log)
        writer.add_scalar("state_bytes", state_bytes)
    for step in range(steps):
        rows = torch.randint(len(inputs), (100,))
        opt.zero_grad()
        out = model(inputs[rows])
        opt.observe(out)  # the one line that a likelihood adds
        # A mean over the examples, which the likelihood "categorical" fits.
        loss = nn.functional.cross_entropy(out, targets[rows])
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
        if writer is not None and step % 10 == 0:  # diagnostics take as long as a step or two
            writer.add_scalar("loss", losses[-1], step)
            for name, value in opt.diagnostics().items():
                writer.add_scalar(name, value, step)
    if writer is not None:
        writer.close()

    # The state resumes to the bit. Save the schedule's and the model's state with it.
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    opt.load_state_dict(torch.load(file))
    return losses, opt


if __name__ == "__main__":
    losses, opt = main(log=sys.argv[1] if len(sys.argv) > 1 else None)
    for step in range(0, len(losses), 10):
        print(f"step {step:3}  loss {losses[step]:.4f}")
    print(f"last      loss {losses[-1]:.4f}  {opt.failures()}")
