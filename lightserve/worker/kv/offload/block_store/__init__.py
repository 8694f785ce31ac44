"""Places for blocks of KV below host memory: a folder on a disk, and Redis. No torch."""
