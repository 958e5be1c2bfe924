"""Looking inside of checkpoints: whether one is intact, what has changed, whether it would load, what its numbers are.

Everything here works on checkpoints of any format, on tensors that are larger than the memory, and, where the format
can be read without torch, without torch.
"""
