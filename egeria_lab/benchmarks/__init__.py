"""The suites behind ``egeria-lab bench``: each has ``run(quick) -> dict`` and names its goals."""
