"""Conversations to prompts: templates in a process of their own, user text shielded."""
