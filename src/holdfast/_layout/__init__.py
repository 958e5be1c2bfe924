"""What ranks hold of tensors: meshes and placements, what each kind of tensor holds on this rank."""
