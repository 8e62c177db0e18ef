"""The builds that a test run measures: the candidate, and the reference where one is asked for."""

import contextlib
import os

import msgspec

from perf.facts.failure import LaunchError, ReferenceFailure
from perf.facts.fault import Fault
from perf.facts.hardware import Node
from perf.measure.arm import Arm
from perf.measure.connection import ROOT
from perf.measure.reference import CANDIDATE, Build, opened
from perf.settings import Settings


class Arms:
    """Both builds' servers, each started with its first run, and what is made for them."""

    def __init__(self, settings: Settings, node: Node) -> None:
        self._settings = settings
        self._node = node
        self._opened = contextlib.ExitStack()
        self._reference: Arm | None = None
        self._refusal: ValueError | ReferenceFailure | None = None
        build = msgspec.structs.replace(CANDIDATE, variables=settings.variables)
        if settings.candidate is not None:
            try:
                build = self._opened.enter_context(opened(settings.candidate, settings.variables))
            except ValueError as error:
                raise ValueError(f"--perf-candidate {error}") from None
        self.candidate = self._arm("candidate", build, fault=settings.fault)

    def reference(self) -> Arm:
        """The reference build, made with the first cell that needs it.

        Raises:
            ReferenceFailure: its server does not start; it is not tried again.
            ValueError: it is this very build, or cannot be made.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._reference is None:
            assert self._settings.reference is not None
            build = self._opened.enter_context(opened(self._settings.reference))
            without = tuple(name for name, _ in self._settings.variables)
            arm = self._arm("reference", msgspec.structs.replace(build, without=without))
            mine = self.candidate.imported
            try:
                other = arm.imported
            except LaunchError as error:
                self._refusal = ReferenceFailure(f"the reference, {self._settings.reference.said}: {error}")
                raise self._refusal from None
            if (mine.strategies, mine.torch) == (other.strategies, other.torch) and not self._settings.variables:
                self._refusal = ValueError(
                    f"both builds import {mine.strategies} and {mine.torch} under the same variables: nothing would be "
                    "compared with nothing; name another ref, folder or interpreter, or add --perf-ab-env"
                )
                raise self._refusal
            self._reference = arm
        return self._reference

    def close(self) -> None:
        """Ends both servers, and removes what was made for the reference."""
        self._opened.close()

    def _arm(self, name: str, build: Build, *, fault: Fault | None = None) -> Arm:
        settings = self._settings
        arm = Arm(
            name,
            build,
            self._node,
            caches=os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(settings.state / "inductor")),
            deadline_s=settings.deadline_s,
            commit=settings.commit if build.source == ROOT else None,
            fault=fault,
            proves=settings.reference is not None,
        )
        self._opened.callback(arm.close)
        return arm
