"""The demo adapters' data: for each job a prompt, templates, words and a score a program can compute. Knows no models."""
