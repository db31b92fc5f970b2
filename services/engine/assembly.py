"""Puts the engine core together: model, tables, store, pools."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ModelInfo

from services.common.checkpoint import Checkpoint
from services.common.errors import StartupError
from services.common.grpc_client import socket_target
from services.common.shm import region_counts
from services.engine.cache.sizing import least_unit
from services.engine.cache.spec import CacheGroup
from services.engine.cache.store_client import StoreClient
from services.engine.config import CoreConfig, DeviceName
from services.engine.core import EngineCore
from services.engine.core_events import to_cache_groups
from services.engine.core_watch import CoreWatch
from services.engine.flags import EngineFlags
from services.engine.grammar.compiled import make_matcher
from services.engine.image_opening import ImageOpener
from services.engine.model_card import tokenizer_sha256
from services.engine.models.base import StageModel
from services.engine.models.registry import family_of, load_model
from services.engine.runtime.executor import LocalExecutor
from services.engine.sampling.grammar import MakeMatcher
from services.engine.scheduler.messages import Request, RequestSampling, RequestStopping
from services.engine.table_opening import Tables, open_tables

NO_PEER = "none"
UNIT_TOKENS = 64  # of the prefix cache, where all pages of the model divide it
DEFAULT_NUM_SEQS = 64
DEFAULT_BATCHED_TOKENS = 2048
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass
class Assembly:
    """Everything that the core process holds, in one place to describe and to close."""

    core: EngineCore
    info: ModelInfo
    config: CoreConfig
    weight_bytes: int
    tables: Tables
    store: StoreClient | None
    images: ImageOpener
    watch: CoreWatch

    @classmethod
    def build(cls, flags: EngineFlags, watch: CoreWatch | None = None) -> Assembly:
        """Load the model and connect it.

        Raises CheckpointError or StartupError where starting again would not help, ServiceError
        where a peer does not answer.
        """
        watch = watch or CoreWatch()
        device = _device(flags)
        dtype = _dtype(flags, device)
        torch.set_num_threads(flags.threads or max(1, len(os.sched_getaffinity(0)) // 2))
        with Checkpoint.open(flags.model) as checkpoint:
            family, weights = family_of(checkpoint.config), checkpoint.fingerprint()
        started = time.monotonic()
        model = load_model(
            flags.model,
            device=device,
            compute_dtype=dtype,
            quantised_cache=flags.kv_cache_dtype != "auto",
        )
        logger.info("weights loaded", extra={"seconds": round(time.monotonic() - started, 3)})
        tokenizer = tokenizer_sha256(flags.model)
        config = _core_config(
            flags,
            model,
            device,
            _fingerprint(weights, tokenizer, _pixel_settings(flags.model), dtype, model.groups),
        )
        tables = open_tables(flags, model.ngrams, device)
        if tables.source is not None:
            tables.source = replace(tables.source, watched=watch.gathers.watched)
        store = _store(flags, config, watch)
        try:
            executor = partial(LocalExecutor, make_matcher=_matchers(flags, model))
            core = EngineCore(model, config, tables.source, store, make_executor=executor)
        except ValueError as error:
            tables.close()
            raise StartupError(str(error)) from error
        info = ModelInfo(
            family=family,
            fingerprint=config.model_fingerprint,
            tokenizer_sha256=tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=config.max_model_len,
            takes_images=model.vision is not None,
        )
        images = ImageOpener(_absolute(flags.run_dir))
        return cls(core, info, config, model.weight_bytes, tables, store, images, watch)

    def first_step(self) -> None:
        """Compute one token of one request, so that nothing is done for the first time later."""
        stopping = RequestStopping(max_tokens=1)
        greedy = RequestSampling(temperature=0.0, seed=0)
        self.core.submit(Request("first-step", (0,), stopping, greedy))
        while self.core.has_work:
            self.core.step()
        self.core.reset_prefix_cache()

    def describe(self) -> pb.DescribeEngineResponse:
        """The core's part of DescribeEngine, at this moment."""
        load = self.core.load()
        regions, nbytes = region_counts()
        return pb.DescribeEngineResponse(
            model=self.info,
            cache_groups=to_cache_groups(load),
            weight_bytes=self.weight_bytes,
            regions_pinned=self.store is not None and self.store.arena_pinned,
            device=self.config.device,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            unit_tokens=self.config.unit_tokens,
            open_regions=regions,
            region_bytes=nbytes,
            kvcache_connected=load.store_connected,
            offload_connected=self.tables.from_offload,
        )

    def close(self) -> None:
        """End the session with the store and unmap the tables."""
        if self.store is not None:
            self.store.close()
        self.tables.close()


def _matchers(flags: EngineFlags, model: StageModel) -> MakeMatcher:
    """Follows outputs through compiled grammars, in the tokens of the checkpoint."""
    folder, vocab_size = flags.model, model.vocab_size
    return lambda compiled, stops: make_matcher(compiled, folder, vocab_size, stops)


def _device(flags: EngineFlags) -> torch.device:
    wanted = flags.device or "auto"
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: no CUDA device is available")
    return torch.device(wanted)


def _dtype(flags: EngineFlags, device: torch.device) -> torch.dtype:
    if flags.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[flags.dtype]


def _core_config(
    flags: EngineFlags, model: StageModel, device: torch.device, fingerprint: str
) -> CoreConfig:
    name: DeviceName = "cuda" if device.type == "cuda" else "cpu"
    max_num_seqs = flags.max_num_seqs or DEFAULT_NUM_SEQS
    try:
        return CoreConfig(
            max_model_len=flags.max_model_len or model.max_positions,
            model_fingerprint=fingerprint,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=flags.max_num_batched_tokens
            or max(DEFAULT_BATCHED_TOKENS, max_num_seqs),
            unit_tokens=least_unit(model.groups, UNIT_TOKENS),
            enable_prefix_caching=flags.enable_prefix_caching,
            prefix_cache_retention_interval=flags.prefix_cache_retention_interval,
            max_waiting_tokens=flags.max_waiting_tokens,
            kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
            num_kv_tokens=flags.num_kv_tokens,
            state_slots=flags.num_state_slots,
            device=name,
            max_logprobs=flags.max_logprobs,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def _fingerprint(
    weights: str, tokenizer: str, pixels: str, dtype: torch.dtype, groups: tuple[CacheGroup, ...]
) -> str:
    """Equal only where cached bytes may be exchanged: weights, inputs, arithmetic, layout."""
    digest = hashlib.sha256()
    for part in (weights, tokenizer, pixels, str(dtype), *map(repr, groups)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _pixel_settings(folder: Path) -> str:
    """What a folder says about the inputs of its vision tower."""
    path = folder / "preprocessor_config.json"
    return path.read_text("utf-8") if path.is_file() else ""


def _store(flags: EngineFlags, config: CoreConfig, watch: CoreWatch) -> StoreClient | None:
    if flags.kvcache_address == NO_PEER or not flags.enable_prefix_caching:
        return None
    return StoreClient(
        flags.kvcache_address or socket_target(_absolute(flags.run_dir), "kvcache"),
        _absolute(flags.run_dir),
        client_id=flags.instance,
        model_fingerprint=config.model_fingerprint,
        watch=watch,
    )


def _absolute(path: Path) -> Path:
    return path.absolute()
