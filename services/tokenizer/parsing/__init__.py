"""Reasoning and tool-call parsers: one streaming machine, one grammar per family."""
