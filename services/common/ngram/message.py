"""A table as `offload.proto` describes it."""

from __future__ import annotations

from warhorse.v1 import offload_pb2, tensor_pb2

from services.common.ngram.layout import EngramParameters, HashParameters, TableLayout

DTYPES = {"F8_E4M3": tensor_pb2.DTYPE_F8_E4M3, "BF16": tensor_pb2.DTYPE_BF16}


def table_message(
    layout: TableLayout,
    storage: offload_pb2.TableStorage,
    region: tensor_pb2.Region | None = None,
) -> offload_pb2.Table:
    """The served form of `layout`, from the start of `region` where it is in memory."""
    message = offload_pb2.Table(
        name=layout.name,
        region=region,
        rows=layout.rows,
        row_bytes=layout.row_bytes,
        dtype=DTYPES[layout.dtype],
        row_values=layout.row_values,
        scale=layout.scale,
        row_scale_bytes=layout.row_scale_bytes,
        fingerprint=layout.fingerprint,
        storage=storage,
    )
    match layout.hash:
        case HashParameters() as ple:
            message.hash.CopyFrom(_ple_hash(ple))
        case EngramParameters() as engram:
            message.engram_hash.CopyFrom(_engram_hash(engram))
    return message


def _ple_hash(parameters: HashParameters) -> offload_pb2.HashParameters:
    return offload_pb2.HashParameters(
        multipliers=parameters.multipliers,
        head_sizes=parameters.head_sizes,
        head_offsets=parameters.head_offsets,
        ngram_size=parameters.ngram_size,
        eos_token_id=parameters.eos_token_id,
    )


def _engram_hash(parameters: EngramParameters) -> offload_pb2.EngramParameters:
    return offload_pb2.EngramParameters(
        multipliers=parameters.multipliers,
        head_sizes=parameters.head_sizes,
        head_offsets=parameters.head_offsets,
        ngram_size=parameters.ngram_size,
        pad_token_id=parameters.pad_token_id,
        image_token_id=parameters.image_token_id,
        compressed_ids=parameters.compressed_ids,
    )
