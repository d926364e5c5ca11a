"""What steps cost: times by kinds of steps, and the complexity table of whole methods."""
