"""Structured output: what an output must look like, and which tokens keep it so."""
