"""What prims compute: on torch tensors and on numpy arrays."""
