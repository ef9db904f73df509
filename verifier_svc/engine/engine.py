"""The engine: requests in, events out, a step at a time."""

from __future__ import annotations

from common.errors import EngineClosedError
from common.types import Request
from verifier_svc.engine.executor import StepExecutor
from verifier_svc.orchestrator.orchestrator import Orchestrator
from verifier_svc.orchestrator.step import Event


class Engine:
    """Drives the orchestrator and the device. Not thread-safe: one thread owns it.

    Args:
        orchestrator: plans and applies.
        executor: runs the plans.
        depth: steps in flight at most. 1 is the synchronous loop; 2 is the asynchronous one, which plans step N+1
            before the outcome of step N is known. Both yield the same tokens.
    """

    def __init__(self, orchestrator: Orchestrator, executor: StepExecutor, depth: int) -> None:
        self.orchestrator = orchestrator
        self._executor = executor
        self._depth = depth
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def executor(self) -> StepExecutor:
        return self._executor

    @property
    def has_work(self) -> bool:
        return self.orchestrator.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ResourceExhaustedError: the queue is full.
            EngineClosedError: closed, or a step has failed.
        """
        self._check_alive()
        self.orchestrator.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request; no event of it comes any more. False: there is none of that id."""
        return self.orchestrator.abort(request_id)

    def step(self) -> list[Event]:
        """Keep the device busy, then take one outcome.

        Returns:
            What happened, in the order of the step's rows; nothing when there was no work.

        Raises:
            EngineClosedError: a step has failed; the cause is attached, and no request can be served any more.
        """
        self._check_alive()
        self._submit()
        return self._apply_oldest()

    def drain(self) -> list[Event]:
        """Take the outcomes of all steps in flight: aborted rows and blocks are back after it.

        More is planned only if no request is left: one step without rows, which tells the draft method so.
        A step that fails here is reported by the next call that needs the device.
        """
        events: list[Event] = []
        orchestrator = self.orchestrator
        try:
            while self._failure is None and not self._closed and orchestrator.has_work:
                if orchestrator.num_in_flight == 0:
                    if orchestrator.num_running or orchestrator.num_waiting:
                        break
                    self._submit()
                events += self._apply_oldest()
        except EngineClosedError:
            pass
        return events

    def _submit(self) -> None:
        orchestrator = self.orchestrator
        while orchestrator.num_in_flight < self._depth:
            plan = orchestrator.plan()
            if plan is None:
                break
            try:
                self._executor.submit(plan)
            except BaseException as error:  # an interrupt too: the plan counts as in flight, and the device lacks it
                self._failure = error
                if isinstance(error, Exception):
                    raise _closed_by(error) from error
                raise

    def _apply_oldest(self) -> list[Event]:
        if self.orchestrator.num_in_flight == 0:
            return []
        try:
            outcome = self._executor.result()
        except Exception as error:
            self._failure = error
            raise _closed_by(error) from error
        return self.orchestrator.apply(outcome)

    def close(self) -> None:
        """Stop the device worker. Requests that still run get no further events."""
        if not self._closed:
            self._closed = True
            self._executor.close()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine has been closed")
        if self._failure is not None:
            raise EngineClosedError(f"the engine stopped after a step failed: {self._failure!r}") from self._failure


def _closed_by(error: Exception) -> EngineClosedError:
    return EngineClosedError(f"a step failed, the engine cannot go on: {error!r}")
