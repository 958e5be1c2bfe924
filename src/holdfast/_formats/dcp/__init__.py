"""The files of ``torch.distributed.checkpoint``."""
