"""Safetensors files, and folders of them as Hugging Face models are stored."""
