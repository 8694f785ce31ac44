"""Audio towers: from the features of sounds to embeddings that a text model reads."""
