"""How processes of one machine talk: typed ZMQ channels, msgpack, child processes."""
