"""What ``holdfast.integrations.torch_dcp`` is made of."""
