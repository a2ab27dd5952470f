"""Runs vLLM's own scheduler and cache manager, without a model, on a script of requests. Needs vLLM, not Loadwise.

Reads one JSON object on stdin and prints one on stdout: the settings and operations of `test_vllm_scheduler`, and what
each step did. Kept apart because vLLM lives in an environment of its own.
"""

import json
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1_000_000,
    "max_position_embeddings": 1_000_000,
}


def open_scheduler(settings: dict[str, Any]) -> tuple[Scheduler, Any]:
    """vLLM's scheduler with these settings, and what names blocks."""
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(MODEL, file)
    size = settings["block_size"]
    n_groups = settings["n_state_groups"]
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=100_000)
    scheduling = SchedulerConfig(
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        long_prefill_token_threshold=settings["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=settings["scheduler_reserve_full_isl"],
        policy=settings["scheduling_policy"],
        max_model_len=100_000,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=size, enable_prefix_caching=settings["has_prefix_cache"])
    config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
    # Block 0 is vLLM's own null block.
    cache.num_gpu_blocks = settings["num_gpu_blocks"] + 1
    cache.block_size = size
    attention = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["attention"], attention)]
    if n_groups:
        cache.mamba_cache_mode = "align"
        state = MambaSpec(block_size=size, shapes=((2 * size,),), dtypes=(torch.float32,), mamba_cache_mode="align")
        groups = [KVCacheGroupSpec([f"state{i}"], state) for i in range(n_groups)] + groups
    kv = KVCacheConfig(num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = StructuredOutputManager(config)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=manager,
        block_size=size,
        log_stats=True,
    )
    init_none_hash(sha256)
    return scheduler, get_request_block_hasher(size, sha256)


def run(script: dict[str, Any]) -> list[dict[str, Any]]:
    """Do the operations before each step, step, and note what was scheduled."""
    scheduler, hasher = open_scheduler(script["settings"])
    said: dict[str, list[int]] = {}
    log: list[dict[str, Any]] = []
    for i, operations in enumerate(script["steps"]):
        for operation in operations:
            if operation["kind"] == "cancel":
                scheduler.finish_requests(operation["id"], RequestStatus.FINISHED_ABORTED)
                continue
            said[operation["id"]] = operation["said"]
            scheduler.add_request(
                Request(
                    request_id=operation["id"],
                    prompt_token_ids=operation["prompt"],
                    sampling_params=SamplingParams(max_tokens=len(operation["said"]), ignore_eos=True),
                    pooling_params=None,
                    arrival_time=float(operation["order"]),
                    priority=operation["priority"],
                    block_hasher=hasher,
                )
            )
        before = {r.request_id: r.num_preemptions for r in scheduler.requests.values()}
        output = scheduler.schedule()
        preempted = [
            r.request_id for r in scheduler.requests.values() if r.num_preemptions > before.get(r.request_id, 0)
        ]
        tokens = dict(output.num_scheduled_tokens)
        log.append(
            {
                "step": i,
                "tokens": tokens,
                "preempted": sorted(preempted),
                "running": [r.request_id for r in scheduler.running],
                "waiting": len(scheduler.waiting),
                "computed": {name: scheduler.requests[name].num_computed_tokens for name in tokens},
                "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
        )
        names = list(tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            is_caught_up = request.num_computed_tokens >= request.num_tokens
            sampled.append([said[name][request.num_output_tokens]] if is_caught_up else [])
        index = {name: k for k, name in enumerate(names)}
        scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        )
    return log


if __name__ == "__main__":
    found = [run(script) for script in json.load(sys.stdin)]
    print("RESULT " + json.dumps(found))
