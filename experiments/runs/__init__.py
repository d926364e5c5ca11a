"""Training runs: settings, methods, the loop, its files and its pictures."""
