"""AIPerf's requests to a TinyLoop server: `transport` sends them, `tokenizer` is what AIPerf counts tokens with."""
