"""What the tokenizer service costs.

    python -m tests.benchmarks.tokenizer [--model DIR] [--tokens N]

Prints, for this machine and run: the cost of a token in a parse session, near the start of an
output and far into it; the messages per second and the processor time per message of a running
service, one stream per choice and many choices over one call; the time of a rendering.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
from warhorse.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.parsers import SessionFactory, parsers_of
from tests.service_process import ROOT, RunDir, ServiceProcess

MODEL = ROOT / "services/engine/checkpoints/nano_models/nano-qwen3.8-flash-next"
PROSE = "The answer is 42, because nobody asked for more.\nAnother line follows here. "
# A call that is open in a string argument, as the families write it.
CALLS = {
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">',
}
TOOL = tokenizer_pb2.Tool(
    name="f", parameters_json='{"properties": {"a": {"type": "string"}}}', description="d"
)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def endless(ids: list[int]) -> Iterator[int]:
    while True:
        yield from ids


def session_costs(folder: TokenizerFolder, tokens: int) -> None:
    """Cost of a token by its position, pushed one at a time."""
    factory = SessionFactory(folder, parsers_of(folder, "", ""))
    vocabulary = folder.vocabulary
    prose = vocabulary.encode(PROSE)
    state = tokenizer_pb2.PARSE_STATE_CONTENT
    kinds = {
        "content": ([], tokenizer_pb2.ParseOpen(start_state=state)),
        "content, stop strings": (
            [],
            tokenizer_pb2.ParseOpen(start_state=state, stop=["\n\nUser:", "The END"]),
        ),
    }
    for parser, text in CALLS.items():
        opening = vocabulary.encode_segments(vocabulary.split(text))
        message = tokenizer_pb2.ParseOpen(start_state=state, tools=[TOOL], tool_call_parser=parser)
        kinds[f"string argument, {parser}"] = (opening, message)
    for name, (first, opening_message) in kinds.items():
        session = factory.open(opening_message)
        session.push(first)
        stream = endless(prose)
        marks: list[float] = []
        window = 1000
        for _ in range(0, tokens, window):
            batch = [next(stream) for _ in range(window)]
            begun = time.process_time()
            for token_id in batch:
                session.push([token_id])
            marks.append((time.process_time() - begun) / window * 1e6)
        early, late = min(marks[:8]), min(marks[-8:])
        say(f"session, {name}: {early:.2f} us a token at 1k, {late:.2f} us at {tokens // 1000}k")
    begun = time.process_time()
    for _ in range(200):
        factory.open(tokenizer_pb2.ParseOpen(start_state=state, tools=[TOOL]))
    say(f"opening a choice: {(time.process_time() - begun) / 200 * 1e6:.0f} us")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def one_stream(
    stub: tokenizer_pb2_grpc.TokenizerServiceStub, ids: list[int], opening: tokenizer_pb2.ParseOpen
) -> None:
    """One choice, one token a message, sent without waiting for answers."""
    call = stub.Parse()

    async def send() -> None:
        await call.write(tokenizer_pb2.ParseRequest(open=opening))
        for token_id in ids:
            tokens = tokenizer_pb2.ParseTokens(token_ids=[token_id])
            await call.write(tokenizer_pb2.ParseRequest(tokens=tokens))
        await call.done_writing()

    sender = asyncio.create_task(send())
    answers = 0
    async for _ in call:
        answers += 1
    await sender
    assert answers == len(ids)


async def many_choices(
    stub: tokenizer_pb2_grpc.TokenizerServiceStub,
    ids: list[int],
    opening: tokenizer_pb2.ParseOpen,
    choices: int,
) -> None:
    """Many choices over one call, one token of each a message."""
    call = stub.ParseMany()
    item = tokenizer_pb2.ParseManyItem

    async def send() -> None:
        first = tokenizer_pb2.ParseRequest(open=opening)
        items = [item(choice=i, request=first) for i in range(choices)]
        await call.write(tokenizer_pb2.ParseManyRequest(items=items))
        for token_id in ids:
            tokens = tokenizer_pb2.ParseTokens(token_ids=[token_id])
            request = tokenizer_pb2.ParseRequest(tokens=tokens)
            items = [item(choice=i, request=request) for i in range(choices)]
            await call.write(tokenizer_pb2.ParseManyRequest(items=items))
        await call.done_writing()

    sender = asyncio.create_task(send())
    answers = 0
    async for response in call:
        answers += len(response.answers)
    await sender
    assert answers == len(ids) * choices


async def service_costs(process: ServiceProcess, folder: TokenizerFolder) -> None:
    """Messages per second and processor time per message of a running service."""
    stream = endless(folder.vocabulary.encode(PROSE))
    opening = tokenizer_pb2.ParseOpen(start_state=tokenizer_pb2.PARSE_STATE_CONTENT)
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for streams in (1, 16, 64):
            ids = [next(stream) for _ in range(16_000 // streams)]
            cpu, begun = cpu_seconds(process.pid), time.perf_counter()
            await asyncio.gather(*(one_stream(stub, ids, opening) for _ in range(streams)))
            report(f"Parse, {streams} streams", streams * len(ids), begun, cpu, process)
        for choices in (16, 64):
            ids = [next(stream) for _ in range(64_000 // choices)]
            cpu, begun = cpu_seconds(process.pid), time.perf_counter()
            await many_choices(stub, ids, opening, choices)
            report(f"ParseMany, {choices} choices", choices * len(ids), begun, cpu, process)
        for words in (10, 10_000):
            await rendering(stub, words)


def report(name: str, count: int, begun: float, cpu: float, process: ServiceProcess) -> None:
    seconds = time.perf_counter() - begun
    per_message = (cpu_seconds(process.pid) - cpu) / count * 1e6
    say(f"{name}: {count / seconds:.0f} tokens/s, {per_message:.0f} us processor time a token")


async def rendering(stub: tokenizer_pb2_grpc.TokenizerServiceStub, words: int) -> None:
    content = [tokenizer_pb2.ContentPart(text="several words of text " * (words // 4))]
    request = tokenizer_pb2.RenderRequest(
        messages=[tokenizer_pb2.ChatMessage(role="user", content=content)], tools=[TOOL]
    )
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        await stub.Render(request)
        times.append(time.perf_counter() - begun)
    say(f"Render, {words} words: {sorted(times)[10] * 1e3:.1f} ms at the median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, default=200_000)
    arguments = parser.parse_args()
    folder = TokenizerFolder.open(arguments.model)
    session_costs(folder, arguments.tokens)
    run_dir = RunDir()
    flags = ["--model", str(arguments.model)]
    process = ServiceProcess("tokenizer", "warhorse.v1.TokenizerService", run_dir.path, flags)
    try:
        process.start()
        asyncio.run(service_costs(process, folder))
    finally:
        process.stop()
        run_dir.close()


if __name__ == "__main__":
    main()
