"""Which launches the variants cover, found without a card.

The benchmark's cases hold the shapes of the served models. Here their tensors have no memory, and
Triton's own launch code says what it would compile for each call; nothing runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs

from kernels.aot.registry import operations, variants
from kernels.aot.stand_in import sample_launch, stand_in_for
from kernels.aot.variant import Variant
from kernels.bench.case import Work
from kernels.cards import CARDS

CARD = torch.device("cuda", 0)
DEVICE, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class WithoutMemory(TorchFunctionMode):
    """Tensors for a card have no memory; their addresses are multiples of 16.

    They say that they are on a card. Values read back from them are zeros; all of them fulfil
    what is asked of all, and none what is asked of any.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        if function in (DEVICE, IS_CUDA) and args[0].is_meta:
            return CARD if function == DEVICE else True
        kwargs = {key: _moved(value) for key, value in (kwargs or {}).items()}
        match getattr(function, "__name__", "").strip("_"):
            case "cuda":
                return args[0].to("meta")
            case "pin_memory":
                return args[0]
            case "is_pinned":
                return True
            case "to":
                args = tuple(map(_moved, args))
            case "bool" | "int" | "float" | "item" | "tolist" if args[0].is_meta:
                return function(torch.zeros(args[0].shape, dtype=args[0].dtype))
            case "all" | "any" as asked if args[0].is_meta and len(args) == 1:
                return torch.tensor(asked == "all")
        return function(*args, **kwargs)


def _moved(value: Any) -> Any:
    on_card = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "meta" if on_card else value


@contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """What launches in this context would compile: identities, and the kernels' names.

    Of kernels that this process has not compiled yet: Triton does not ask for those again.
    """
    found: dict[str, str] = {}

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        facts = json.loads(compile["specialization_data"])
        del facts["key"]  # as the options were written in the launch
        found[json.dumps(facts)] = f"{fn.module}.{fn.name}"
        return True  # nothing is compiled or launched

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


def requested(variant: Variant) -> str:
    """The identity of what `variant` compiles."""
    with recorded() as found:
        variant.kernel.warmup(*sample_launch(variant), grid=(1,), **variant.options)
    (identity,) = found
    return identity


def uncovered(target: int, only: str = "") -> Iterator[str]:
    """Launches of the cases whose "operation name" contains `only` that no variant compiles.

    This process takes itself to be on such a card from then on, and can launch nothing.
    """
    os.environ["TRITON_OVERRIDE_ARCH"] = f"sm{target}"
    stand_in_for(target)
    properties = SimpleNamespace(
        multi_processor_count=CARDS[target].multiprocessors,
        shared_memory_per_multiprocessor=CARDS[target].shared_bytes,
    )
    torch.cuda.get_device_properties = lambda _: properties  # type: ignore[assignment, misc]
    known = {requested(variant) for variant in variants(target)}
    for module in operations("bench"):
        for case in module.cases():
            if only in f"{case.operation} {case.name}":
                yield from missing(f"{case.operation}: {case.name}", case.make, known)


def missing(name: str, make: Callable[[], Work], known: set[str]) -> Iterator[str]:
    """What the calls of a case would compile beside what is `known`, and why it is none of it."""
    with recorded() as found, WithoutMemory():
        for call in make().calls:
            call()
    for identity, kernel in found.items():
        if identity not in known:
            yield f"{name}: no variant of {kernel} for {_differences(identity, known)}"


def _differences(identity: str, known: set[str]) -> str:
    """What sets a launch apart from the nearest variant of its kernel."""
    wanted = _facts(identity)
    nearest: dict[str, object] = wanted
    for other in map(_facts, known):
        if other["name"] == wanted["name"]:
            apart = {k: v for k, v in wanted.items() if other.get(k) != v}
            nearest = min(nearest, apart, key=len)
    return ", ".join(f"{key} {value}" for key, value in nearest.items())


def _facts(identity: str) -> dict[str, object]:
    """Name, and by argument its type, its specialisation and its constant, and the options."""
    data = json.loads(identity)
    names = list(data["signature"])
    facts: dict[str, object] = {"name": data["name"]} | data["options"]
    facts |= {f"type of {name}": kind for name, kind in data["signature"].items()}
    for (at,), value in zip(data["attrs_keys"], data["attrs_vals"], strict=True):
        facts[f"{names[at]} as"] = "a multiple of 16" if value else "any number"
    for (at,), value in zip(data["constant_keys"], data["constant_vals"], strict=True):
        facts[names[at]] = value
    return facts
