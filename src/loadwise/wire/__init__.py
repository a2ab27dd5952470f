"""HTTP/1.1 at the level of bytes: the server and the client that gateway and emulator stand on."""
