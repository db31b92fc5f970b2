"""Layers of the DeepSeek-V4 family."""
