"""Training for a long time under faults, restarts and changing numbers of processes."""
