"""load and open: open, match, agree, read, apply."""
