"""The live host: sockets, clock and journal around the same machines that the simulator drives."""
