"""Vision towers: from the pixels of images to embeddings that a text model reads."""
