"""The engine process: ``python -m graftwork_engine.process`` reads an `EngineConfig` as JSON from standard input and serves it.

Exit codes: 0 told to stop, `EXIT_CONFIG` when starting again cannot help, anything else is a crash that the supervisor
answers with a new engine.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys

import msgspec

from graftwork_engine.assembly import build_engine
from graftwork_engine.config import EngineConfig
from graftwork_engine.errors import ConfigError, UnsupportedModel
from graftwork_engine.lifeline import die_with_parent
from graftwork_engine.loop import serve

logger = logging.getLogger(__name__)

EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: the configuration or the model is at fault."""


def main() -> None:
    """Entry point of the process; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Graftwork engine; its configuration comes as JSON on standard input.")
    parser.add_argument("--endpoint", required=True, help="ZMQ address to bind, for example ipc:///run/graftwork/engine")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor; the engine dies with it")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
        assembly = build_engine(config)
    except (ConfigError, UnsupportedModel, msgspec.ValidationError) as error:
        logger.error("%s", error)
        sys.exit(EXIT_CONFIG)
    serve(assembly, arguments.endpoint, config.step_limit_s)


if __name__ == "__main__":
    main()
