"""The towers of each family of models: see ``VisionTower``."""
