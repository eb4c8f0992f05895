"""The plugin's logger: a child of vLLM's, so that its lines appear with vLLM's own format and level."""

import logging
from functools import cache

logger = logging.getLogger("vllm.kvplugin")
# The engine-neutral parts log under the package's name; inside vLLM their lines belong beside the others.
logging.getLogger("kvplugin").parent = logger


@cache
def warn_once(message: str) -> None:
    """Log a warning the first time this process sees the text."""
    logger.warning(message, stacklevel=2)


@cache
def info_once(message: str) -> None:
    """Log a line the first time this process sees the text."""
    logger.info(message, stacklevel=2)
