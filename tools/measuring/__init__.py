"""What `bench` and `experiments` share: a clock, records, provenance, tables."""
