"""The decoder models, read top-down from llama.py. Refuses to know requests."""
