"""What ``torch.save`` writes: zip archives, and pickles that are read as data. DCP's files are made of these too."""
