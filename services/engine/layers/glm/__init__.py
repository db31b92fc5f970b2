"""Layers of GLM-5.3: Kimi delta attention, latent attention over pooled selections, experts."""
