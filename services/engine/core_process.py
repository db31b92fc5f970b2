"""`python -m services.engine.core_process`: the process that runs the model.

Started by the front with the front's own flags and the descriptors of two rings. Exit status 2
means that it can never start with this checkpoint and these settings.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from warhorse.v1.stage_pb2 import CoreDescription, CoreEvent, CoreReady

from services.common.checkpoint import CheckpointError
from services.common.config import parse_config
from services.common.errors import StartupError
from services.common.lifecycle import EXIT_CANNOT_START, EXIT_FAILED
from services.common.logs import setup_logging
from services.common.ring import Ring, RingClosed
from services.common.tracing import make_tracer
from services.engine.assembly import Assembly
from services.engine.core_end import attach_rings, die_with_front
from services.engine.core_loop import CoreLoop
from services.engine.core_watch import CoreWatch
from services.engine.flags import EngineFlags
from services.engine.runtime.profiling import StepProfiler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CoreFlags(EngineFlags):
    """The engine's flags and what ties the process to its front."""

    command_fds: tuple[str, ...] = field(metadata={"help": "descriptors of the commands' ring"})
    event_fds: tuple[str, ...] = field(metadata={"help": "descriptors of the events' ring"})
    front_pid: int = field(metadata={"help": "process that this one ends with"})


def main(argv: Sequence[str]) -> int:
    """Run until the front says stop; the exit status."""
    flags = parse_config(
        CoreFlags, argv, prog="python -m services.engine.core_process", description="Internal."
    )
    setup_logging("engine-core", flags.log_level)
    faulthandler.enable()
    try:
        die_with_front(flags.front_pid)
        commands, events = attach_rings(flags.command_fds, flags.event_fds)
        tracer = make_tracer("engine-core", flags.instance, flags.otlp_traces_endpoint)
        assembly = Assembly.build(flags, CoreWatch(tracer))
    except (CheckpointError, StartupError) as error:
        logger.critical("cannot start: %s", error)
        return EXIT_CANNOT_START
    try:
        _serve(assembly, commands, events, StepProfiler(flags.profile_dir, flags.instance))
    except RingClosed:
        return EXIT_FAILED  # the front is gone
    except Exception:
        logger.critical("the engine core failed", exc_info=True)
        return EXIT_FAILED
    finally:
        assembly.close()
        tracer.close()
    return 0


def _serve(assembly: Assembly, commands: Ring, events: Ring, profiler: StepProfiler) -> None:
    assembly.first_step()
    description = CoreDescription(engine=assembly.describe())
    ready = CoreReady(model=assembly.info, description=description)
    events.send(CoreEvent(ready=ready).SerializeToString())
    loop = CoreLoop(
        assembly.core,
        commands,
        events,
        assembly.describe,
        assembly.images.open,
        assembly.watch,
        profiler,
    )
    loop.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
