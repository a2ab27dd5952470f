"""The vocabulary: facts, events, commands, machines, chance and errors. Imports nothing of ours."""
