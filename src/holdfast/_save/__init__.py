"""save and async_save: capture, agree, write, commit."""
