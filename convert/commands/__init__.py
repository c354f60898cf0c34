"""`iqforge convert` and `iqforge convert-lora`."""
