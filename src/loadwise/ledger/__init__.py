"""What we have promised of each backend's capacity: a belief about engines, never their truth."""
