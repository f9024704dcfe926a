"""plotly.js for the page: from the installed package, packed once, sent by the kernel; no CDN, no copy of our own."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files


@cache
def packed_plotly() -> bytes:
    """plotly.js of the installed plotly package, gzip'ed (1.5 MB)."""
    return gzip.compress(files("plotly").joinpath("package_data/plotly.min.js").read_bytes(), 6)
