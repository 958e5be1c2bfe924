"""Live objects of a program (models, optimizers, schedulers, random streams) as plain state, and back."""
