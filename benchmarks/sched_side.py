"""One side of the scheduler benchmark, in a process of its own: kvsched's scheduler, or vLLM's.

Started by scheduler.py with the interpreter of that side. Reads one case a line (JSON) and answers with CPU seconds
and scheduled requests. Both sides run the same workload through the same loop; only `schedule` and `update` are timed,
with the process's CPU clock. What a runner would do (making the result) stands outside the clock.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import deque
from pathlib import Path
from time import process_time
from typing import Any


class KvschedSide:
    """kvsched's scheduler; with case["events"], every event is recorded in a list."""

    def __init__(self, case: dict[str, Any]) -> None:
        from kvsched.config import SchedulerConfig
        from kvsched.request import Request, SamplingParams
        from kvsched.sched.scheduler import Scheduler
        from kvsched.step import StepResult

        self._request, self._sampling, self._result = Request, SamplingParams, StepResult
        self.events: list[Any] = []
        config = SchedulerConfig(
            num_blocks=case["num_blocks"],
            block_size=16,
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["budget"],
            max_model_len=case["max_model_len"],
            async_scheduling=case["async"],
            max_in_flight=case["depth"],
            defer_block_free=case["fence"],
        )
        self._scheduler = Scheduler(config, emit=self.events.append if case["events"] else None)
        self.schedule = self._scheduler.schedule
        self.update = self._scheduler.update

    def add(self, name: str, prompt: list[int], max_tokens: int, arrival: float) -> None:
        self._scheduler.add_request(
            self._request(name, prompt, self._sampling(max_tokens=max_tokens), arrival_time=arrival)
        )

    def ids(self, step: Any) -> tuple[str, ...]:
        return step.request_ids

    def result(self, step: Any, token: int) -> Any:
        chunks = step.prefill_chunks
        return self._result(step.step, tuple([() if i in chunks else (token,) for i in step.request_ids]))

    def busy(self) -> bool:
        return self._scheduler.has_unfinished()


class VllmSide:
    """vLLM's own scheduler, driven without a model."""

    def __init__(self, case: dict[str, Any]) -> None:
        import logging
        import os

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        class NoStructure:
            def accept_tokens(self, *args: Any) -> bool:
                return True

        logging.disable(logging.CRITICAL)
        init_none_hash(sha256_cbor)
        self._sampling, self._request, self._output = SamplingParams, Request, ModelRunnerOutput
        self._hasher = get_request_block_hasher(16, sha256_cbor)
        with tempfile.TemporaryDirectory() as folder:
            write_model_config(Path(folder), case["max_model_len"])
            model = ModelConfig(
                model=folder,
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=case["max_model_len"],
                seed=0,
            )
        sched = SchedulerConfig(
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["budget"],
            max_model_len=case["max_model_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=case["async"],
        )
        cache = CacheConfig(block_size=16, enable_prefix_caching=True)
        cache.num_gpu_blocks = case["num_blocks"]
        config = VllmConfig(
            model_config=model,
            scheduler_config=sched,
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(),
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        kv_config = KVCacheConfig(num_blocks=case["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
        kind = AsyncScheduler if case["async"] else Scheduler
        self._scheduler = kind(config, kv_config, NoStructure(), block_size=16, log_stats=False)
        self._scheduler.use_v2_model_runner = False
        self._scheduler.defer_block_free = case["fence"]
        self.schedule = self._scheduler.schedule
        self.update = self._scheduler.update_from_output
        self._live: dict[str, Any] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int, arrival: float) -> None:
        params = self._sampling(max_tokens=max_tokens)
        request = self._request(name, prompt, params, None, arrival_time=arrival, block_hasher=self._hasher)
        self._live[name] = request
        self._scheduler.add_request(request)

    def ids(self, step: Any) -> list[str]:
        return list(step.num_scheduled_tokens)

    def result(self, step: Any, token: int) -> Any:
        ids = list(step.num_scheduled_tokens)
        rows = [[] if self._live[i].is_prefill_chunk else [token] for i in ids]
        return self._output(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=rows)

    def busy(self) -> bool:
        return bool(self._scheduler.has_unfinished_requests())


def write_model_config(folder: Path, max_model_len: int) -> None:
    """The configuration of a small model: vLLM's scheduler reads no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
        "max_position_embeddings": max_model_len,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(side: Any, case: dict[str, Any]) -> dict[str, float]:
    """Run a case: warm up, then time `schedule` and `update`. Returns seconds, scheduled requests and steps."""
    rng = random.Random(case["seed"])
    for i in range(case["requests"]):
        prompt = [rng.randrange(1, 1000) for _ in range(case["prompt"])]
        side.add(f"r{i}", prompt, case["max_tokens"], float(i))
    in_flight: deque[tuple[Any, Any]] = deque()
    seconds = 0.0
    scheduled = steps = calls = 0
    while side.busy() and steps < case["steps"]:
        calls += 1
        timed = calls > case["warm_up"]
        start = process_time()
        step = side.schedule()
        taken = process_time() - start
        ids = side.ids(step)
        if timed:
            seconds += taken
            scheduled += len(ids)
            steps += 1
        if ids:
            in_flight.append((step, side.result(step, 7)))
        if len(in_flight) == case["depth"] or (in_flight and not ids):
            oldest, result = in_flight.popleft()
            start = process_time()
            side.update(oldest, result)
            if timed:
                seconds += process_time() - start
    return {"seconds": seconds, "scheduled": scheduled, "steps": steps}


def main() -> None:
    """Answer cases until the input ends."""
    kind = {"kvsched": KvschedSide, "vllm": VllmSide}[sys.argv[1]]
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(measure(kind(case), case)), file=answers, flush=True)


if __name__ == "__main__":
    main()
