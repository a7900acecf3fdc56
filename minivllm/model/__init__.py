"""The plain MiniQwen model, its configuration and its weights."""
