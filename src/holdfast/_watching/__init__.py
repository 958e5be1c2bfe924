"""Events of every phase, progress, and who gets them."""
