"""What the front needs of an engine core, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from warhorse.v1.stage_pb2 import (
    CoreDescription,
    CoreProfileDone,
    CoreReady,
    CoreResetDone,
    CoreStep,
    CoreSubmit,
)


class CoreListener(Protocol):
    """Called by a link on the event loop."""

    def on_ready(self, ready: CoreReady) -> None:
        """The core takes requests from now on."""
        ...

    def on_step(self, step: CoreStep) -> None:
        """Everything one step has to say; also a sign of life about once a second."""
        ...

    def on_lost(self, message: str) -> None:
        """The core is gone and with it every live request; `on_ready` follows a restart."""
        ...

    def unsent_tokens(self, handle: int) -> int:
        """Tokens of a request that wait for its reader."""
        ...

    def on_refused(self, exit_code: int) -> None:
        """The core cannot start and a restart would not help; the process must end."""
        ...


class CoreLink(Protocol):
    """One engine core. All calls on the event loop; none blocks.

    Calls while no core is ready raise ServiceError (LOADING or ENGINE_LOST).
    """

    def start(self, listener: CoreListener) -> None:
        """Bring the core up; `listener` hears of it."""
        ...

    def submit(self, submit: CoreSubmit) -> None:
        """Hand over a validated request. Its updates come under its handle."""
        ...

    def abort(self, handle: int) -> None:
        """Forget a request within one step; updates already on the way may still come."""
        ...

    async def reset(self) -> CoreResetDone:
        """Drop the unreferenced entries of the prefix cache."""
        ...

    async def profile(self, *, start: bool) -> CoreProfileDone:
        """Start a trace of the steps, or stop and write it; the answer may be a refusal."""
        ...

    async def describe(self) -> CoreDescription:
        """Present counters of the core."""
        ...

    async def stop(self) -> None:
        """End the core and free what the link holds."""
        ...
