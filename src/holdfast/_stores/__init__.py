"""Where the files of a checkpoint are: local disks, memory, object stores. Bytes only, no tensors."""
