"""huggingface_hub's client, as this package uses it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qconvert.client.retries import without_userinfo

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class _WithoutUserinfo(logging.Filter):
    """Takes secrets out of the URLs that the client names in warnings when it retries."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_userinfo(record.getMessage()), ()
        return True


_FILTER = _WithoutUserinfo()


def client() -> HfApi:
    """The client, which knows from the environment where the Hub is and with which token."""
    from huggingface_hub import HfApi

    from qconvert import __version__

    logging.getLogger("huggingface_hub.utils._http").addFilter(
        _FILTER
    )  # adding it twice adds it once
    return HfApi(library_name="qconvert", library_version=__version__)
