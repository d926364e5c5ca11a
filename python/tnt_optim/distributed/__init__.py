"""Training with several processes: process groups, owner ranks, DDP and FSDP2."""
