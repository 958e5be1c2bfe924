"""What is at a place: the checkpoints there, of whatever format, and what saves have left. No data is read for it."""
