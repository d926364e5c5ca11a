"""TNT with DistributedDataParallel: every process has its part of the batch.

Needs nothing but this package; run ``torchrun --nproc-per-node 2 examples/data_parallel.py``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tnt_optim import TNT


def main(steps: int = 60) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns this process's losses and the optimizer."""
    torch.manual_seed(0)  # the same data and the same start everywhere
    inputs = torch.randn(2000, 20)
    targets = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5))(2 * inputs).argmax(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5)),
    )
    # Each statistic, factor and momentum is kept by one process only.
    opt = TNT(model.parameters(), likelihood="categorical", shard="directions")
    batches = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(inputs), (50,), generator=batches)
        opt.zero_grad()
        out = model(inputs[rows])
        opt.observe(out)  # in every process
        loss = nn.functional.cross_entropy(out, targets[rows])
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, opt


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" on GPUs, and a model on each process's GPU
    losses, opt = main()
    if dist.get_rank() == 0:
        for step in range(0, len(losses), 10):
            print(f"step {step:3}  loss {losses[step]:.4f}")
        print(f"last      loss {losses[-1]:.4f}  {opt.failures()}")
    dist.destroy_process_group()
