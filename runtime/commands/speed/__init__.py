"""Commands that measure speed: `iqforge bench`, `sweep-bench` and `profile`."""
