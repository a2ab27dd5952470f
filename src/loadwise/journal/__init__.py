"""What happened, on disk; and what can be asked of it: recover, replay, tell one program's story."""
