"""A run: many checkpoints of one training, when they are made, and which of them are kept."""
