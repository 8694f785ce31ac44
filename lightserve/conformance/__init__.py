"""``lightserve conformance``: whether a device computes, copies, captures and serves as LightServe expects it."""
