"""Experiments on real outcomes: replay a stream of measured runs through the stack's own policies and judge them."""
