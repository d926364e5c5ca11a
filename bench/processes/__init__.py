"""Training steps shared by several processes: what they send, keep and take."""
