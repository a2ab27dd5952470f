"""One llama.cpp server on a loopback port of the system's choice: `python -m loadwise.demo.llama GGUF NAME SLOTS`.

Prints `listening URL` once it answers, and serves until it is ended. The server comes from the package `xllamacpp`, a
build of llama.cpp's own server; installing it is the extra `real`.
"""

import signal
import socket
import sys

CONTEXT_TOKENS_PER_SLOT = 2048


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main(arguments: list[str]) -> int:
    """Serve one weights file."""
    import xllamacpp

    path, name, slots = arguments[0], arguments[1], int(arguments[2])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = free_port()
    parameters.model_alias = {name}
    parameters.n_parallel = slots
    parameters.n_ctx = slots * CONTEXT_TOKENS_PER_SLOT
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = True
    parameters.use_jinja = True
    parameters.cpuparams.n_threads = 2
    server = xllamacpp.Server(parameters)
    print("listening", server.listening_address, flush=True)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
