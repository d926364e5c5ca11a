"""What a step's companions cost: grafting, bounds, rounding, the checks for faults, diagnostics."""
