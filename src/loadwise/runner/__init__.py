"""Where checks and embedders really run: what would block an event loop or must be shut in lives here."""
