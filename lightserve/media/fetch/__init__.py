"""Fetches the images of requests that are URLs of other servers, by the rules of lightserve/outbound, for redirects
too."""
