"""API keys: their text, their hashes at rest, and who is calling."""
