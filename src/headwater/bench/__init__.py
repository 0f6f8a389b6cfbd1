"""`headwater bench`: what prefix caching buys on a server, told over HTTP. Imports nothing that serves."""
