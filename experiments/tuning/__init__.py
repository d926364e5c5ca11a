"""Searches for settings: grids, what was found, heat maps."""
