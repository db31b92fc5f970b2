"""Builder of `nano-qwen3.8-flash-next`, the small trained checkpoint that ships as default model.

Recipe, seed and measured scores: README.md beside this file.
"""
