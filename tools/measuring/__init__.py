"""What `bench` and `experiments` share: models' shapes, sizes of states, packages."""
