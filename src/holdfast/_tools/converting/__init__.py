"""From one format to another, in pieces of tensors."""
