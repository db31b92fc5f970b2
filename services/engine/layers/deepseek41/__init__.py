"""Layers that only DeepSeek-V4.1 has: caches shared between layers, single-pass mHC, Engram."""
