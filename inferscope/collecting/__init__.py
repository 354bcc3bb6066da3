"""The `collect` service: one collector per host or shard, live exporters, incident pins."""
