"""The paper's experiments: data, models, one training loop, one module per experiment."""
