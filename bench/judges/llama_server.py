"""llama.cpp's server with so many slots of so many tokens: GGUF SLOTS TOKENS PORT. It ends when it is told to."""

import signal
import sys


def main(arguments: list[str]) -> None:
    """Serve one weights file."""
    import xllamacpp

    path, slots, tokens, port = arguments[0], *map(int, arguments[1:])
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = path, {"m"}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    parameters.n_parallel = slots
    parameters.n_ctx = slots * tokens
    # Contexts that lose their slot are lost, as they are on a GPU server that has no memory to spare for them.
    parameters.cache_ram_mib = 0
    parameters.kv_unified = False
    parameters.cpuparams.n_threads = 2
    parameters.endpoint_metrics = parameters.endpoint_slots = parameters.endpoint_props = True
    server = xllamacpp.Server(parameters)
    print("listening", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
