"""Other gateways, each in its own environment, started as their users start them.

A peer is one module that holds one `Peer`: what to install, how to start it, what to send with a request.
Two of the three choose by a policy; each is here with the policy its users get unless they ask for another
(`cache_aware`) and with the cheapest one (`round_robin`), under a name of its own.
"""

from __future__ import annotations

from bench.peers import litellm, smg, vllm_router
from bench.peers.peer import Peer, PeerUnavailable

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        litellm.PEER,
        smg.PEER,
        smg.ROUND_ROBIN,
        vllm_router.PEER,
        vllm_router.ROUND_ROBIN,
    )
}

__all__ = ["PEERS", "Peer", "PeerUnavailable"]
