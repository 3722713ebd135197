"""Measuring the engine: what `nanoserve bench` prints comes from here."""
