"""What `python -m kernels.bench --profile` runs under Nsight Compute: one call of each case.

Standard input gives the cases as a JSON list of [operation, name]. A kernel that only waits marks
where a case begins; a JSON line a case tells their order.
"""

from __future__ import annotations

import json
import sys

import torch

from kernels.bench.case import Call
from kernels.bench.measure import all_cases


def main(wanted: list[list[str]]) -> None:
    """Prints the name of each case after its call, or why it has none."""
    for case in all_cases():
        if [case.operation, case.name] not in wanted:
            continue
        names = {"operation": case.operation, "case": case.name}
        try:
            call = case.make().calls[0]
            call()
        except Exception as failure:  # does not compile or fit: the other cases go on
            names["refused"] = f"{type(failure).__name__}: {str(failure)[:200]}"
        else:
            _profile(call)
        print(json.dumps(names), flush=True)
        torch.cuda.empty_cache()


def _profile(call: Call) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(json.load(sys.stdin))
