"""A client of MCP servers, for the tools that requests name: streamable HTTP, JSON-RPC, tools only.

It is not the SDK's client: that one resolves names and follows redirects itself, where the rules of lightserve/outbound
need the address that was checked, and it brings OAuth, a server and a validator of schemas that nothing here uses.
"""
