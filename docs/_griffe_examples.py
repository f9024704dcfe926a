"""Google style calls the section `Examples`; our docstrings say `Example`: read one as the other."""

import re
from typing import Any

import griffe


class SingularExample(griffe.Extension):
    """Rename the section before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Called for each object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:\s*$", "Examples:", obj.docstring.value)
