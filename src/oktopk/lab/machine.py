"""The machine that results were measured on."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from ..common import host
from ..common.version import version_of


@dataclass(frozen=True)
class Machine:
    """Facts that results depend on. Only the processor must be in a file."""

    processor: str
    cores: int = 0
    system: str = ""
    python: str = ""
    torch: str = ""
    oktopk: str = ""


def this_machine() -> Machine:
    return Machine(
        host.processor(),
        len(host.cores()),
        platform.platform(),
        platform.python_version(),
        version_of("torch"),
        version_of("oktopk"),
    )
