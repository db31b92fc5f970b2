"""What a process says about itself."""

from __future__ import annotations

import os

from services.common.describe import API_VERSION, new_generation, service_info


def test_the_answer_identifies_this_life_of_this_process() -> None:
    info = service_info("engine-0", 7)
    assert (info.instance_id, info.generation, info.pid) == ("engine-0", 7, os.getpid())
    assert info.api_version == API_VERSION
    assert info.build_version
    assert info.resident_bytes > 1 << 20


def test_resident_bytes_follow_the_memory_in_use() -> None:
    before = service_info("engine-0", 7).resident_bytes
    block = bytearray(os.urandom(1)) * (64 << 20)
    assert service_info("engine-0", 7).resident_bytes - before > 32 << 20
    del block


def test_generations_are_positive_and_differ() -> None:
    drawn = {new_generation() for _ in range(100)}
    assert len(drawn) == 100
    assert 0 < min(drawn) <= max(drawn) < 1 << 63
