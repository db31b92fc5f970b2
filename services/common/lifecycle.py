"""The outermost frame of a service process: logging, the event loop, the exit status."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from services.common.errors import StartupError
from services.common.logs import setup_logging

_log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CANNOT_START = 2


def run(
    service: str, main: Callable[[], Coroutine[Any, Any, None]], *, log_level: str = "info"
) -> int:
    """Run `main()` to its end and return the exit status for `sys.exit`.

    0: it returned. 1: it failed, logged with the traceback. 2: it raised StartupError, logged as
    one line (a restart will not help before the operator changes something).
    """
    setup_logging(service, log_level)
    faulthandler.enable()
    settle_heap()
    try:
        asyncio.run(main())
    except StartupError as error:
        _log.critical("cannot start: %s", error)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:  # Ctrl-C before the server installed its signal handlers
        return EXIT_FAILED
    except Exception:
        _log.critical("the service failed", exc_info=True)
        return EXIT_FAILED
    return 0


def settle_heap() -> None:
    """Exempt what exists now from garbage collection; call it when a service has been set up.

    Modules, classes and schemas live as long as the process, and every full collection would walk
    all of them, which takes tens of milliseconds in the middle of a stream.
    """
    gc.collect()
    gc.freeze()
