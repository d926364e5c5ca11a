"""The layer under `bench` and `experiments`: clock, records, provenance, tables."""
