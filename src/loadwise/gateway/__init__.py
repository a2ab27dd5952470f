"""The live host: one endpoint, one owner of the stack, relays that carry bytes."""
