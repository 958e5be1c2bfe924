"""What people do to checkpoints that exist: list, inspect, convert, repair, delete, report, serve."""
