"""The methods themselves: torch and the standard library only, usable in anybody's own loop."""
