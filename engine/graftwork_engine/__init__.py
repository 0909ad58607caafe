"""Tokens in, tokens out. Refuses to know tenants, adapter names and SQL."""
