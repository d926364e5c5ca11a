"""The comparison beyond the paper, on a character-level transformer."""
