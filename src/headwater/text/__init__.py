"""Between text and tokens: tokenizers, chat templates, incremental decoding, stop strings."""
