"""The live page: pictures of the cache, shared by all who look, and the page that shows them."""
