"""`python -m services.engine --model DIR`: the front process of one engine replica."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from warhorse.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server

from services.common.config import parse_config
from services.common.describe import new_generation
from services.common.errors import StartupError
from services.common.grpc_server import GrpcServer
from services.common.lifecycle import EXIT_CANNOT_START, run
from services.common.metrics import ProcessMetrics
from services.common.tracing import make_tracer
from services.engine.flags import EngineFlags
from services.engine.front import Front, FrontConfig
from services.engine.front_watch import FrontWatch, Rings
from services.engine.grammar.service import GrammarCompiler
from services.engine.link import CoreLink
from services.engine.model_card import ModelCard
from services.engine.server import SERVICE_NAME, EngineServicer

OPEN_ENDED = tuple(f"/{SERVICE_NAME}/{name}" for name in ("Load", "Drain", "GenerateMany"))


def main(argv: Sequence[str]) -> int:
    """Run the service to its end; the exit status."""
    flags = parse_config(
        EngineFlags, argv, prog="python -m services.engine", description="Tokens in, tokens out."
    )
    return run("engine", lambda: serve(flags, make_link(flags, argv)), log_level=flags.log_level)


async def serve(flags: EngineFlags, link: CoreLink) -> None:
    """Serve `link` until a stop signal, or until its core cannot be started."""
    tracer = make_tracer("engine", flags.instance, flags.otlp_traces_endpoint)
    metrics = ProcessMetrics()
    watch = FrontWatch(tracer, ring_stats_of(link))
    metrics.add(*watch.readings())
    server = GrpcServer(
        "engine",
        flags.instance,
        flags.run_dir,
        listen=flags.listen,
        grace_seconds=flags.grace_seconds,
        open_ended=OPEN_ENDED,
        metrics=metrics,
        tracer=tracer,
    )
    front = Front(
        front_config(flags),
        link,
        lambda on: server.set_serving(SERVICE_NAME, on),
        _grammars(flags),
        watch,
    )
    servicer = EngineServicer(front, flags.instance, new_generation())
    add_EngineServiceServicer_to_server(servicer, server.server)
    await server.start()
    server.set_serving(SERVICE_NAME, False)
    front.refused.add_done_callback(lambda _: server.ask_stop())
    front.start()
    try:
        with metrics.served(flags.metrics_host, flags.metrics_port):
            await server.run_until_signal(front.drain)
    finally:
        await front.stop()
        tracer.close()
    if front.refused.done():
        raise _failure(front.refused.result())


def ring_stats_of(link: CoreLink) -> Rings:
    """Where the counters of the rings are read; a scripted core has none."""
    from services.engine.process_link import ProcessLink

    return link.ring_stats if isinstance(link, ProcessLink) else dict


def _failure(exit_code: int) -> Exception:
    if exit_code == EXIT_CANNOT_START:
        return StartupError("the engine core refused to start; its own log line names the cause")
    return RuntimeError("the engine core keeps failing before it is ready")


def _grammars(flags: EngineFlags) -> GrammarCompiler | None:
    """A script is replayed whatever a grammar says."""
    if flags.engine != "model":
        return None
    return GrammarCompiler(flags.model, ModelCard.read(flags.model).vocab_size)


def front_config(flags: EngineFlags) -> FrontConfig:
    """The front's part of the flags. A script's chunks stay messages of their own by default."""
    merge = flags.engine == "model" if flags.merge_tokens is None else flags.merge_tokens
    return FrontConfig(
        model_names=flags.model_names,
        max_waiting_tokens=flags.max_waiting_tokens,
        max_logprobs=flags.max_logprobs,
        merge_tokens=merge,
        watchdog_seconds=flags.watchdog_seconds,
    )


def make_link(flags: EngineFlags, argv: Sequence[str]) -> CoreLink:
    """The core that the flags ask for. Raises StartupError for a script that is not sound."""
    if flags.script is None or flags.engine == "model":
        from services.engine.process_link import ProcessLink

        return ProcessLink(argv)
    from services.engine.scripted import open_scripted

    return open_scripted(flags.model, flags.script, flags.max_model_len)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
