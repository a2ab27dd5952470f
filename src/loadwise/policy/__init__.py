"""Choosing and learning: baselines and bandits behind one small contract."""
