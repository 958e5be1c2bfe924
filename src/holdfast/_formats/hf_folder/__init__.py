"""Folders of safetensors files as Hugging Face models are stored."""
