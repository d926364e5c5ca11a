"""TNT's own: labels, warm starts from outputs, and degenerate statistics in closed form."""
