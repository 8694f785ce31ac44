"""Files and batches of requests that outlive the server: their folder, their store, and the format of their lines."""
