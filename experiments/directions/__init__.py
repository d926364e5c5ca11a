"""Figure 1: the directions of methods beside that of the block Fisher method."""
