"""The tokenizer service: conversations and text to tokens, tokens to text, reasoning, calls."""
