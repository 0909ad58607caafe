"""Between text and token ids: tokenizer, chat template, incremental detokenisation. Knows no requests."""
