"""Dynamic sparse training: where weights live, how masks are made and changed, and how training holds them."""
