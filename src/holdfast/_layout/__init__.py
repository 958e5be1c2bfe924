"""Pure arithmetic: boxes, meshes and placements, what each kind of tensor holds on this rank."""
