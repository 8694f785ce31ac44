"""Fetches the images of requests that are URLs of other servers. A client must not reach through it what it could not
reach itself: addresses are public and checked before they are dialled, for redirects too."""
