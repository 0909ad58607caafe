"""OpenAI's inference endpoints: from a key and a body to a stream of text, metered. Knows no SQL and no tensors."""
