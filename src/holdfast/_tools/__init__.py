"""What people do to checkpoints that exist: list, inspect, convert, repair, report, serve."""
