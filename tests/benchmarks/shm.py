"""Costs of the data plane between two processes, printed with the method.

    python -m tests.benchmarks.shm [--tensor-mib 64] [--rounds 40] [--hops 5000]

Tensor: the sender copies a private, warm array into a region that both processes mapped earlier
and sends its reference through a ring; the receiver looks at the tensor in place (first and last
bytes, which change every round) and answers through a second ring. The clock runs from before the
copy to the answer's arrival. Each round also times one memcpy of the same array into private, warm
memory; the ratio is the median over the rounds, so it compares like with like whatever else the
host is doing. Nobody polls. `copied out` has the receiver copy the tensor into memory of its own,
in pieces, while the sender still writes.

Hop: half of a ping-pong of 64-byte messages, and one way by the monotonic clock, which all
processes of a host share. `asleep` waits on the doorbell at once, `polling` spins first.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from warhorse.v1 import tensor_pb2

from services.common.broker import RegionBroker
from services.common.ring import Ring, RingClosed
from services.common.shm import MappedRegion, Region, open_region

Array = npt.NDArray[np.uint8]

MIB = 1 << 20
PIECE = MIB
HOP_BYTES = 64
LOOK, COPY, ECHO_ASLEEP, ECHO_POLLING = range(4)
SPIN_SECONDS = 0.002


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="wh-") as folder:
        run_dir = Path(folder)
        broker = RegionBroker(run_dir / "bench" / "bench-0.fd", "bench")
        region = Region.create(options.tensor_mib * MIB, owner="bench")
        with _receiver(run_dir, broker.publish(region)) as (there, back):
            _report_hops(there, back, options.hops)
            _report_tensor(region, there, back, options.rounds)
        region.close()
        broker.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tensor-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hops", type=int, default=5000)
    return parser.parse_args()


# -- sender ---------------------------------------------------------------------------------------


@contextmanager
def _receiver(run_dir: Path, ref: tensor_pb2.Region) -> Iterator[tuple[Ring, Ring]]:
    """The other process, and the rings to it and back."""
    with Ring.create() as there, Ring.create() as back:
        fds = there.fds() + back.fds()
        arguments = [ref.SerializeToString().hex(), str(run_dir), *map(str, fds)]
        command = [sys.executable, "-m", "tests.benchmarks.shm_receiver", *arguments]
        child = subprocess.Popen(command, pass_fds=fds)
        try:
            yield there, back
            there.close()
            child.wait(10)
        finally:
            child.kill()
            child.wait()


def _report_hops(there: Ring, back: Ring, count: int) -> None:
    for name, mode, spin in (("asleep", ECHO_ASLEEP, 0.0), ("polling", ECHO_POLLING, SPIN_SECONDS)):
        half, one_way = _ping_pong(there, back, mode, spin, count)
        print(
            f"ring hop, {name}: {_micro(half)} half round trip, {_micro(one_way)} one way "
            f"({count} messages of {HOP_BYTES} bytes)"
        )


def _ping_pong(
    there: Ring, back: Ring, mode: int, spin: float, count: int
) -> tuple[list[float], list[float]]:
    half, one_way = [], []
    padding = bytes(HOP_BYTES - 1)
    for number in range(count + 200):
        started = time.monotonic_ns()
        there.send(bytes([mode]) + padding, 10)
        answer = back.receive(10, spin_seconds=spin)
        ended = time.monotonic_ns()
        assert answer is not None
        if number >= 200:
            half.append((ended - started) / 2e9)
            one_way.append((int.from_bytes(answer[:8], "little") - started) / 1e9)
    return half, one_way


def _report_tensor(region: Region, there: Ring, back: Ring, rounds: int) -> None:
    source = np.random.default_rng(0).integers(0, 255, region.nbytes, np.uint8)
    private, target = source.copy(), region.array(np.uint8)
    ways: dict[str, Callable[[], None]] = {
        "memcpy, private": lambda: np.copyto(private, source),
        "memcpy, into the region": lambda: np.copyto(target, source),
        "to the other process, read in place": lambda: _hand_over(source, target, there, back),
        "to the other process, copied out": lambda: _in_pieces(source, target, there, back),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        source[0] = source[-1] = number % 256
        for name, work in ways.items():
            seconds = _timed(work)
            if number >= 3:
                times[name].append(seconds)
    base = times["memcpy, private"]
    for name, each in times.items():
        ratio = statistics.median(t / copy for t, copy in zip(each, base, strict=True))
        best = min(each) / min(base)
        print(
            f"{region.nbytes // MIB} MiB, {name}: {_milli(each)}, "
            f"{ratio:.2f} x memcpy (best to best {best:.2f})"
        )


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _hand_over(source: Array, target: Array, there: Ring, back: Ring) -> None:
    np.copyto(target, source)
    there.send(_message(LOOK, 0, len(source)), 10)
    answer = back.receive(10)
    assert answer == bytes([source[0], source[-1]])


def _in_pieces(source: Array, target: Array, there: Ring, back: Ring) -> None:
    for start in range(0, len(source), PIECE):
        stop = min(start + PIECE, len(source))
        np.copyto(target[start:stop], source[start:stop])
        there.send(_message(COPY, start, stop), 10)
    answer = back.receive(10)
    assert answer == bytes([source[0], source[-1]])


def _message(mode: int, start: int, stop: int) -> bytes:
    ref = tensor_pb2.ShmRef(offset=start, nbytes=stop - start)
    return bytes([mode]) + ref.SerializeToString()


def _quantiles(times: list[float]) -> tuple[float, float]:
    return statistics.median(times), sorted(times)[int(len(times) * 0.99)]


def _micro(times: list[float]) -> str:
    middle, high = _quantiles(times)
    return f"p50 {middle * 1e6:.1f} us, p99 {high * 1e6:.1f} us"


def _milli(times: list[float]) -> str:
    return f"p50 {statistics.median(times) * 1e3:.2f} ms (best {min(times) * 1e3:.2f})"


# -- receiver -------------------------------------------------------------------------------------


def receive(ref_text: str, run_dir: str, *fds: str) -> None:
    """The receiver's life: answer until the ring closes."""
    numbers = [int(fd) for fd in fds]
    ref = tensor_pb2.Region.FromString(bytes.fromhex(ref_text))
    with (
        open_region(ref, Path(run_dir)) as region,
        Ring.attach(numbers[:3], role="consumer") as there,
        Ring.attach(numbers[3:], role="producer") as back,
    ):
        private = np.zeros(region.nbytes, np.uint8)
        spin = 0.0
        try:
            while True:
                message = there.receive(spin_seconds=spin)
                assert message is not None
                spin = SPIN_SECONDS if message[0] == ECHO_POLLING else 0.0
                _answer(message, region, private, back)
        except RingClosed:
            return


def _answer(message: bytes, region: MappedRegion, private: Array, back: Ring) -> None:
    if message[0] in (ECHO_ASLEEP, ECHO_POLLING):
        back.send(time.monotonic_ns().to_bytes(8, "little") + message[8:], 10)
        return
    ref = tensor_pb2.ShmRef.FromString(message[1:])
    start, stop = ref.offset, ref.offset + ref.nbytes
    tensor = region.array(np.uint8)
    if message[0] == LOOK:
        back.send(bytes([tensor[start], tensor[stop - 1]]), 10)
        return
    np.copyto(private[start:stop], tensor[start:stop])
    if stop == region.nbytes:
        back.send(bytes([private[0], private[-1]]), 10)


if __name__ == "__main__":
    main()
