"""The problems that are trained on: data, a model and a loss, one family a file."""
