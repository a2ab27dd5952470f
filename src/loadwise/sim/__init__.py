"""The virtual host: engines, agents, truth and chance in virtual time, driving the same machines as the live host."""
