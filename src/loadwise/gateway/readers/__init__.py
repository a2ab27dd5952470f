"""Engines' own pages, read as signals: one reader per kind of engine."""
