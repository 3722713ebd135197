"""The page, as package data: static files that the server sends as they are. No code and no build step."""
