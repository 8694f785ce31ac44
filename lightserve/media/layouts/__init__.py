"""How each family of models reads images: see ``ImageLayout``."""
