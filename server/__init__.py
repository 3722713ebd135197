"""The ASGI side of nanoserve: HTTP and WebSocket in, `nanoserve.request` data across the seam, bytes out."""
