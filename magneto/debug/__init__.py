"""Presentation: explain, the HTML report, generated documentation. Reads events and the public functions; nothing below imports it."""
